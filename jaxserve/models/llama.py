"""The llama family: pre-norm, grouped-query attention, SwiGLU, one RoPE base."""

from __future__ import annotations

import numpy as np

from jaxserve.models.config import LayerConfig, ModelConfig
from jaxserve.models.family import Part, WeightRule
from jaxserve.models.metadata import Metadata, refuse
from jaxserve.weights.source import TensorSource

name = "llama"
gguf_architectures = ("llama",)
hf_architectures = ("LlamaForCausalLM",)

_GGUF_IGNORED = frozenset({"rope_freqs.weight"})


def config(source: TensorSource) -> ModelConfig:
    """ModelConfig from GGUF keys or from config.json."""
    meta = Metadata(source.metadata)
    return _from_gguf(meta, source) if source.format == "gguf" else _from_hf(meta)


def _from_gguf(meta: Metadata, source: TensorSource) -> ModelConfig:
    if (scaling := meta.get("llama.rope.scaling.type", str, "none")) != "none":
        refuse("llama.rope.scaling.type", scaling, "unscaled RoPE")
    if experts := meta.get("llama.expert_count", int, 0):
        refuse("llama.expert_count", experts, "dense models")
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

    def one(param: str, source: str, *shape: int) -> WeightRule:
        return WeightRule(param, shape, (Part(source, shape),))

    out = [one("embedding.weight", "token_embd.weight" if gguf else "model.embed_tokens.weight", V, H)]
    for i in range(config.num_layers):
        to = f"layers.{i}."
        at = f"blk.{i}." if gguf else f"model.layers.{i}."
        n = _GGUF_LAYER if gguf else _HF_LAYER
        qkv = (
            Part(at + n["q"], (q, H), q_order),
            Part(at + n["k"], (kv, H), k_order),
            Part(at + n["v"], (kv, H)),
        )
        gate_up = (Part(at + n["gate"], (I, H)), Part(at + n["up"], (I, H)))
        out += [
            one(to + "attention_norm.weight", at + n["attention_norm"], H),
            WeightRule(to + "attention.qkv.weight", (q + 2 * kv, H), qkv),
            one(to + "attention.out.weight", at + n["out"], H, q),
            one(to + "mlp_norm.weight", at + n["mlp_norm"], H),
            WeightRule(to + "mlp.gate_up.weight", (2 * I, H), gate_up),
            one(to + "mlp.down.weight", at + n["down"], H, I),
        ]
    out.append(one("final_norm.weight", "output_norm.weight" if gguf else "model.norm.weight", H))
    if not config.tie_embeddings:
        out.append(one("lm_head.weight", "output.weight" if gguf else "lm_head.weight", V, H))
    return out


_GGUF_LAYER = {
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
_HF_LAYER = {
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
        return _GGUF_IGNORED
    inv_freq = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(config.num_layers)}
    return frozenset(inv_freq | ({"lm_head.weight"} if config.tie_embeddings else set()))
