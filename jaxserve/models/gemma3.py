"""The gemma3 family (text): alternating sliding windows, two RoPE bases, q/k norms, norms on both sides."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jaxserve.errors import WeightsError
from jaxserve.models.config import LayerConfig, ModelConfig
from jaxserve.models.family import Part, WeightRule, stack_layers
from jaxserve.models.metadata import Metadata, refuse
from jaxserve.weights.source import TensorSource

name = "gemma3"
gguf_architectures = ("gemma3",)
hf_architectures = ("Gemma3ForCausalLM",)

LOCAL_ROPE_THETA = 10_000.0
DEFAULT_PATTERN = 6  # every sixth layer attends to the whole context


def config(source: TensorSource) -> ModelConfig:
    """ModelConfig from GGUF keys or from config.json."""
    meta = Metadata(source.metadata)
    return _from_gguf(meta, source) if source.format == "gguf" else _from_hf(meta)


def _layers(is_local: list[bool], window: int, theta: float, local_theta: float) -> tuple[LayerConfig, ...]:
    local = LayerConfig(window=window, rope_theta=local_theta)
    return tuple(local if one else LayerConfig(window=None, rope_theta=theta) for one in is_local)


def _from_gguf(meta: Metadata, source: TensorSource) -> ModelConfig:
    key = "gemma3."
    meta.refuse_gguf_rope_scaling("gemma3", source.tensors)
    for cap in (key + "attn_logit_softcapping", key + "final_logit_softcapping"):
        if value := meta.get(cap, float, 0.0):
            refuse(cap, value, "no soft cap")
    heads = meta.need(key + "attention.head_count", int)
    head_dim = meta.need(key + "attention.key_length", int)
    if (value_dim := meta.get(key + "attention.value_length", int, head_dim)) != head_dim:
        refuse(key + "attention.value_length", value_dim, f"the key length, {head_dim}")
    num_layers, hidden = meta.need(key + "block_count", int), meta.need(key + "embedding_length", int)
    # GGUF has no key for the query scale; the 27B model, alone, scales by hidden / heads.
    scaled_dim = hidden // heads if num_layers == 62 else head_dim
    pattern = meta.get(key + "attention.sliding_window_pattern", int, DEFAULT_PATTERN)
    return ModelConfig(
        family=name,
        vocab_size=len(meta.need("tokenizer.ggml.tokens", list)),
        hidden_size=hidden,
        intermediate_size=meta.need(key + "feed_forward_length", int),
        num_heads=heads,
        num_kv_heads=meta.get(key + "attention.head_count_kv", int, heads),
        head_dim=head_dim,
        max_position=meta.need(key + "context_length", int),
        rms_norm_eps=meta.need(key + "attention.layer_norm_rms_epsilon", float),
        attention_scale=scaled_dim**-0.5,
        activation="gelu_tanh",
        tie_embeddings="output.weight" not in source.tensors,
        embedding_scale=hidden**0.5,
        qk_norm=True,
        post_norms=True,
        layers=_layers(
            [(i + 1) % pattern != 0 for i in range(num_layers)],
            meta.need(key + "attention.sliding_window", int),
            meta.get(key + "rope.freq_base", float, 1_000_000.0),
            meta.get(key + "rope.freq_base_swa", float, LOCAL_ROPE_THETA),
        ),
    )


def _from_hf(meta: Metadata) -> ModelConfig:
    theta, local_theta = meta.get("rope_theta", float, 1_000_000.0), meta.get(
        "rope_local_base_freq", float, LOCAL_ROPE_THETA
    )
    meta.refuse_rope_scaling()
    if by_kind := meta.get("rope_parameters", dict, {}):
        # Newer files: one set of RoPE parameters for each kind of layer.
        rope = Metadata(by_kind)
        full, local = (Metadata(rope.need(k, dict)) for k in ("full_attention", "sliding_attention"))
        for nested in (full, local):
            if (kind := nested.get("rope_type", str, "default")) != "default":
                refuse("rope_parameters.rope_type", kind, "default (unscaled)")
        theta, local_theta = full.need("rope_theta", float), local.need("rope_theta", float)
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if (cap := meta.get(key, float, None)) is not None:
            refuse(key, cap, "null")
    for key in ("attention_bias", "use_bidirectional_attention"):
        if meta.get(key, bool, False):
            refuse(key, True, "false")
    activation = meta.get("hidden_activation", str, "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        refuse("hidden_activation", activation, "gelu_pytorch_tanh")
    num_layers, hidden = meta.need("num_hidden_layers", int), meta.need("hidden_size", int)
    pattern = meta.get("sliding_window_pattern", int, DEFAULT_PATTERN)
    default_kinds = [
        "full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(num_layers)
    ]
    kinds = meta.get("layer_types", list, default_kinds)
    if len(kinds) != num_layers:
        raise WeightsError(f"layer_types has {len(kinds)} entries, num_hidden_layers is {num_layers}")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            refuse("layer_types", kind, "full_attention, sliding_attention")
    heads = meta.need("num_attention_heads", int)
    return ModelConfig(
        family=name,
        vocab_size=meta.need("vocab_size", int),
        hidden_size=hidden,
        intermediate_size=meta.need("intermediate_size", int),
        num_heads=heads,
        num_kv_heads=meta.get("num_key_value_heads", int, heads),
        head_dim=meta.get("head_dim", int, 256),
        max_position=meta.need("max_position_embeddings", int),
        rms_norm_eps=meta.get("rms_norm_eps", float, 1e-6),
        attention_scale=meta.get("query_pre_attn_scalar", float, 256.0) ** -0.5,
        activation="gelu_tanh",
        tie_embeddings=meta.get("tie_word_embeddings", bool, True),
        embedding_scale=hidden**0.5,
        qk_norm=True,
        post_norms=True,
        layers=_layers(
            [kind == "sliding_attention" for kind in kinds],
            meta.need("sliding_window", int), theta, local_theta,
        ),
    )  # fmt: skip


def _plus_one(weight: np.ndarray) -> np.ndarray:
    """Hugging Face stores a gemma norm's scale minus one; GGUF files already hold the whole scale."""
    return weight + np.float32(1)


def rules(format: str, config: ModelConfig) -> list[WeightRule]:
    """Every parameter of the decoder, with its tensors' names in a file of `format`."""
    H, I, V, D = config.hidden_size, config.intermediate_size, config.vocab_size, config.head_dim  # noqa: E741
    q, kv = config.num_heads * D, config.num_kv_heads * D
    gguf = format == "gguf"
    n = _GGUF if gguf else _HF

    L, at = config.num_layers, "blk.{}." if gguf else "model.layers.{}."
    offset = None if gguf else _plus_one

    def one(param: str, part: Part) -> WeightRule:
        return WeightRule(param, part.shape, (replace(part, name=n[part.name]),))

    def stacked(param: str, *parts: Part) -> WeightRule:
        return stack_layers("layers." + param, L, [replace(part, name=at + n[part.name]) for part in parts])

    out = [
        one("embedding.weight", Part("embedding", (V, H))),
        stacked("attention_norm.weight", Part("attention_norm", (H,), offset)),
        stacked("attention.qkv.weight", Part("q", (q, H)), Part("k", (kv, H)), Part("v", (kv, H))),
        stacked("attention.q_norm.weight", Part("q_norm", (D,), offset)),
        stacked("attention.k_norm.weight", Part("k_norm", (D,), offset)),
        stacked("attention.out.weight", Part("out", (H, q))),
        stacked("post_attention_norm.weight", Part("post_attention_norm", (H,), offset)),
        stacked("mlp_norm.weight", Part("mlp_norm", (H,), offset)),
        stacked("mlp.gate_up.weight", Part("gate", (I, H)), Part("up", (I, H))),
        stacked("mlp.down.weight", Part("down", (H, I))),
        stacked("post_mlp_norm.weight", Part("post_mlp_norm", (H,), offset)),
        one("final_norm.weight", Part("final_norm", (H,), offset)),
    ]
    if not config.tie_embeddings:
        out.append(one("lm_head.weight", Part("lm_head", (V, H))))
    return out


_GGUF = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "lm_head": "output.weight",
    "attention_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "q_norm": "attn_q_norm.weight",
    "k_norm": "attn_k_norm.weight",
    "out": "attn_output.weight",
    "post_attention_norm": "post_attention_norm.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
    "post_mlp_norm": "post_ffw_norm.weight",
}
_HF = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "attention_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "out": "self_attn.o_proj.weight",
    "post_attention_norm": "post_attention_layernorm.weight",
    "mlp_norm": "pre_feedforward_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}


def ignored(format: str, config: ModelConfig) -> frozenset[str]:
    """Tensors that a file may carry and that are not needed."""
    return frozenset({"lm_head.weight"}) if format != "gguf" and config.tie_embeddings else frozenset()
