"""The llama family: pre-norm, grouped-query attention, SwiGLU, one RoPE base."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jaxserve.models.config import LayerConfig, ModelConfig
from jaxserve.models.family import Part, WeightRule, stack_layers
from jaxserve.models.metadata import Metadata, refuse
from jaxserve.weights.source import TensorSource

name = "llama"
gguf_architectures = ("llama",)
hf_architectures = ("LlamaForCausalLM",)


def config(source: TensorSource) -> ModelConfig:
    """ModelConfig from GGUF keys or from config.json."""
    meta = Metadata(source.metadata)
    return _from_gguf(meta, source) if source.format == "gguf" else _from_hf(meta)


def _from_gguf(meta: Metadata, source: TensorSource) -> ModelConfig:
    meta.refuse_gguf_rope_scaling("llama", source.tensors)
    if experts := meta.get("llama.expert_count", int, 0):
        refuse("llama.expert_count", experts, "dense models")
    if scale := meta.get("llama.attention.scale", float, 0.0):
        refuse("llama.attention.scale", scale, "the root of the head size, that is no such key")
    hidden, heads = meta.need("llama.embedding_length", int), meta.need("llama.attention.head_count", int)
    head_dim = meta.get("llama.attention.key_length", int, hidden // heads)
    for key in ("llama.attention.value_length", "llama.rope.dimension_count"):
        if (other := meta.get(key, int, head_dim)) != head_dim:
            refuse(key, other, f"the head size, {head_dim}")
    theta = meta.get("llama.rope.freq_base", float, 10_000.0)
    return ModelConfig(
        family=name,
        vocab_size=meta.get("llama.vocab_size", int, 0) or len(meta.need("tokenizer.ggml.tokens", list)),
        hidden_size=hidden,
        intermediate_size=meta.need("llama.feed_forward_length", int),
        num_heads=heads,
        num_kv_heads=meta.get("llama.attention.head_count_kv", int, heads),
        head_dim=head_dim,
        max_position=meta.need("llama.context_length", int),
        rms_norm_eps=meta.need("llama.attention.layer_norm_rms_epsilon", float),
        attention_scale=head_dim**-0.5,
        activation="silu",
        tie_embeddings="output.weight" not in source.tensors,  # GGUF has no key for it
        embedding_scale=None,
        qk_norm=False,
        post_norms=False,
        layers=(LayerConfig(window=None, rope_theta=theta),) * meta.need("llama.block_count", int),
    )


def _from_hf(meta: Metadata) -> ModelConfig:
    meta.refuse_rope_scaling()
    for key, supported in (("attention_bias", False), ("mlp_bias", False), ("hidden_act", "silu")):
        if (value := meta.get(key, type(supported), supported)) != supported:
            refuse(key, value, repr(supported))
    hidden, heads = meta.need("hidden_size", int), meta.need("num_attention_heads", int)
    head_dim = meta.get("head_dim", int, hidden // heads)
    return ModelConfig(
        family=name,
        vocab_size=meta.need("vocab_size", int),
        hidden_size=hidden,
        intermediate_size=meta.need("intermediate_size", int),
        num_heads=heads,
        num_kv_heads=meta.get("num_key_value_heads", int, heads),
        head_dim=head_dim,
        max_position=meta.need("max_position_embeddings", int),
        rms_norm_eps=meta.get("rms_norm_eps", float, 1e-6),
        attention_scale=head_dim**-0.5,
        activation="silu",
        tie_embeddings=meta.get("tie_word_embeddings", bool, False),
        embedding_scale=None,
        qk_norm=False,
        post_norms=False,
        layers=(LayerConfig(window=None, rope_theta=meta.rope_theta(10_000.0)),)
        * meta.need("num_hidden_layers", int),
    )


def _half_split(num_heads: int):
    """Undo the row order that GGUF's llama files use for interleaved RoPE: pairs back to halves."""

    def transform(weight: np.ndarray) -> np.ndarray:  # [heads * D, H]
        return (
            weight.reshape(num_heads, -1, 2, weight.shape[-1]).swapaxes(1, 2).reshape(weight.shape)
        )

    return transform


def rules(format: str, config: ModelConfig) -> list[WeightRule]:
    """Every parameter of the decoder, with its tensors' names in a file of `format`."""
    H, I, V = config.hidden_size, config.intermediate_size, config.vocab_size  # noqa: E741
    q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    gguf = format == "gguf"
    q_order = _half_split(config.num_heads) if gguf else None
    k_order = _half_split(config.num_kv_heads) if gguf else None

    n = _GGUF if gguf else _HF
    L, at = config.num_layers, "blk.{}." if gguf else "model.layers.{}."

    def one(param: str, source: str, *shape: int) -> WeightRule:
        return WeightRule(param, shape, (Part(source, shape),))

    def stacked(param: str, *parts: Part) -> WeightRule:
        return stack_layers("layers." + param, L, [replace(part, name=at + n[part.name]) for part in parts])

    out = [
        one("embedding.weight", n["embedding"], V, H),
        stacked("attention_norm.weight", Part("attention_norm", (H,))),
        stacked(
            "attention.qkv.weight",
            Part("q", (q, H), q_order), Part("k", (kv, H), k_order), Part("v", (kv, H)),
        ),
        stacked("attention.out.weight", Part("out", (H, q))),
        stacked("mlp_norm.weight", Part("mlp_norm", (H,))),
        stacked("mlp.gate_up.weight", Part("gate", (I, H)), Part("up", (I, H))),
        stacked("mlp.down.weight", Part("down", (H, I))),
        one("final_norm.weight", n["final_norm"], H),
    ]  # fmt: skip
    if not config.tie_embeddings:
        out.append(one("lm_head.weight", n["lm_head"], V, H))
    return out


_GGUF = {
    "embedding": "token_embd.weight",
    "final_norm": "output_norm.weight",
    "lm_head": "output.weight",
    "attention_norm": "attn_norm.weight",
    "q": "attn_q.weight",
    "k": "attn_k.weight",
    "v": "attn_v.weight",
    "out": "attn_output.weight",
    "mlp_norm": "ffn_norm.weight",
    "gate": "ffn_gate.weight",
    "up": "ffn_up.weight",
    "down": "ffn_down.weight",
}
_HF = {
    "embedding": "model.embed_tokens.weight",
    "final_norm": "model.norm.weight",
    "lm_head": "lm_head.weight",
    "attention_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "out": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}


def ignored(format: str, config: ModelConfig) -> frozenset[str]:
    """Tensors that a file may carry and that are not needed."""
    if format == "gguf":
        return frozenset()
    inv_freq = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(config.num_layers)}
    return frozenset(inv_freq | ({"lm_head.weight"} if config.tie_embeddings else set()))
