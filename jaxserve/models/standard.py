"""What families with the usual wiring share: the keys of their descriptions, the names of their tensors.

A family's module says what differs. `from_hf` and `from_gguf` give the figures that nearly all files spell
the same; `rules` gives every parameter of the decoder that a ModelConfig asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from jaxserve.errors import WeightsError
from jaxserve.models.config import LayerConfig, ModelConfig, MoEConfig
from jaxserve.models.family import Part, WeightRule, stack_layers
from jaxserve.models.metadata import Metadata, refuse
from jaxserve.models.names import GGUF, HF, NEUTRAL
from jaxserve.models.rope_metadata import Rope, rope_from_gguf, rope_from_hf
from jaxserve.weights.source import TensorSource

Transform = Callable[[np.ndarray], np.ndarray]
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}  # as config.json spells them


def from_hf(meta: Metadata, family: str, **changes: Any) -> ModelConfig:
    """ModelConfig from config.json, with `changes` of its fields.

    `layers` is by default one kind of layer, with the RoPE that the file describes. Given as changes,
    `theta`, `head_dim` and `tie_embeddings` are the family's defaults, for files that don't say.
    """
    hidden, heads = meta.need("hidden_size", int), meta.need("num_attention_heads", int)
    head_dim = meta.get("head_dim", int, changes.pop("head_dim", None) or hidden // heads)
    activation = changes.get("activation") or meta.get("hidden_act", str, "silu")
    if activation not in ACTIVATIONS:
        refuse("hidden_act", activation, ", ".join(ACTIVATIONS))
    num_layers = meta.need("num_hidden_layers", int)
    theta = changes.pop("theta", 10_000.0)
    rotary_dim = changes.get("rotary_dim")
    if rotary_dim is None:
        refuse_partial_rope(meta)
    if "layers" not in changes:
        rope = rope_from_hf(meta, rotary_dim or head_dim, theta=theta)
        changes |= {"layers": layers(num_layers, rope), "max_position": rope.max_position}
    known = {
        "family": family,
        "vocab_size": meta.need("vocab_size", int),
        "hidden_size": hidden,
        "intermediate_size": meta.need("intermediate_size", int),
        "num_heads": heads,
        "num_kv_heads": meta.get("num_key_value_heads", int, heads),
        "head_dim": head_dim,
        "max_position": meta.need("max_position_embeddings", int),
        "rms_norm_eps": meta.get("rms_norm_eps", float, 1e-6),
        "attention_scale": head_dim**-0.5,
        "tie_embeddings": meta.get("tie_word_embeddings", bool, changes.pop("tie_embeddings", False)),
        "embedding_scale": None,
        "qk_norm": False,
        "post_norms": False,
    }
    return ModelConfig(**{**known, **changes, "activation": ACTIVATIONS[activation]})


def from_gguf(
    meta: Metadata,
    source: TensorSource,
    family: str,
    architecture: str,
    reads: tuple[str, ...] = (),
    **changes: Any,
) -> ModelConfig:
    """The same from GGUF keys, those of `architecture`.

    `reads` are keys of NEUTRAL that the family sees to; of the others, none may change the answer. GGUF has
    no keys for biases and for tied embeddings: whether the tensors are there tells.
    """
    key = architecture + "."
    refuse_unread(meta, architecture, reads)
    hidden, heads = meta.need(key + "embedding_length", int), meta.need(key + "attention.head_count", int)
    head_dim = meta.get(key + "attention.key_length", int, hidden // heads)
    if (value_dim := meta.get(key + "attention.value_length", int, head_dim)) != head_dim:
        refuse(key + "attention.value_length", value_dim, f"the head size, {head_dim}")
    rotary_dim = meta.get(key + "rope.dimension_count", int, head_dim)
    if rotary_dim != head_dim and "rotary_dim" not in changes:
        refuse(key + "rope.dimension_count", rotary_dim, f"the head size, {head_dim}")
    num_layers, theta = meta.need(key + "block_count", int), changes.pop("theta", 10_000.0)
    if "layers" not in changes:
        rope = rope_from_gguf(meta, source, architecture, changes.get("rotary_dim") or head_dim, theta=theta)
        changes |= {"layers": layers(num_layers, rope), "max_position": rope.max_position}
    vocab_size = meta.get(key + "vocab_size", int, 0) or len(meta.need("tokenizer.ggml.tokens", list))
    known = {
        "family": family,
        "vocab_size": vocab_size,
        "hidden_size": hidden,
        "intermediate_size": meta.need(key + "feed_forward_length", int),
        "num_heads": heads,
        "num_kv_heads": meta.get(key + "attention.head_count_kv", int, heads),
        "head_dim": head_dim,
        "max_position": meta.need(key + "context_length", int),
        "rms_norm_eps": meta.need(key + "attention.layer_norm_rms_epsilon", float),
        "attention_scale": head_dim**-0.5,
        "activation": "silu",
        "tie_embeddings": "output.weight" not in source.tensors,
        "qkv_bias": not source.tensors.keys().isdisjoint({"blk.0.attn_q.bias", "blk.0.attn_qkv.bias"}),
        "out_bias": "blk.0.attn_output.bias" in source.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in source.tensors,
        "embedding_scale": None,
        "qk_norm": False,
        "post_norms": False,
    }
    return ModelConfig(**{**known, **changes})


def refuse_unread(meta: Metadata, architecture: str, reads: Collection[str]) -> None:
    """Raise if one of the keys of NEUTRAL, but those the family `reads`, would change the answer."""
    for name, neutral in NEUTRAL.items():
        value = meta.get(f"{architecture}.{name}", object, neutral[0])
        if name not in reads and value not in neutral:
            refuse(f"{architecture}.{name}", value, f"{neutral[0]!r}, or no such key")


def refuse_partial_rope(meta: Metadata) -> None:
    """Raise if a config.json has RoPE turn a part of each head, in a family where that isn't known."""
    for key in ("rope_scaling", "rope_parameters"):
        nested = Metadata(meta.get(key, dict, {}))
        if (part := nested.get("partial_rotary_factor", float, 1.0)) != 1:
            refuse(f"{key}.partial_rotary_factor", part, "1 (whole heads)")
    if (part := meta.get("partial_rotary_factor", float, 1.0)) != 1:
        refuse("partial_rotary_factor", part, "1 (whole heads)")


def layers(
    count: int, rope: Rope, windows: Callable[[int], int | None] = lambda i: None
) -> tuple[LayerConfig, ...]:
    """`count` layers of one RoPE; `windows` gives the window of layer i."""
    return tuple(LayerConfig(windows(i), rope.theta, rope.scaling) for i in range(count))


def with_layers(
    config: ModelConfig, change: Callable[[int, LayerConfig], LayerConfig], **changes: Any
) -> ModelConfig:
    """`config` with each layer i changed, and with `changes` of other fields."""
    changed = tuple(change(i, layer) for i, layer in enumerate(config.layers))
    return replace(config, layers=changed, **changes)


def windowed(config: ModelConfig, windows: Callable[[int], int | None], **changes: Any) -> ModelConfig:
    """`config` with the window that `windows` gives of each layer i, and with `changes` of other fields."""
    return with_layers(config, lambda i, layer: replace(layer, window=windows(i)), **changes)


def qwen_windows(meta: Metadata, config: ModelConfig) -> ModelConfig:
    """`config` with the sliding windows that a config.json of Qwen asks for; most have none."""
    if not meta.get("use_sliding_window", bool, False):
        return config
    window, first = meta.need("sliding_window", int), meta.get("max_window_layers", int, 28)
    sliding = is_sliding(meta, config.num_layers, lambda i: i >= first)
    return windowed(config, lambda i: window if sliding[i] else None)


def qwen_experts(meta: Metadata, shared_size: int = 0) -> MoEConfig:
    """The experts of a config.json of Qwen."""
    if (step := meta.get("decoder_sparse_step", int, 1)) != 1:
        refuse("decoder_sparse_step", step, "1 (experts in all layers)")
    if dense := meta.get("mlp_only_layers", list, []):
        refuse("mlp_only_layers", list(dense), "[] (experts in all layers)")
    return MoEConfig(
        meta.need("num_experts", int), meta.need("num_experts_per_tok", int),
        meta.need("moe_intermediate_size", int), normalise=meta.get("norm_topk_prob", bool, False),
        shared_size=shared_size,
    )  # fmt: skip


def gemma_activation(meta: Metadata) -> str:
    """What a config.json of Gemma names, or means where it names none."""
    activation = meta.get("hidden_activation", str, "gelu_pytorch_tanh")
    if activation != "gelu_pytorch_tanh":
        refuse("hidden_activation", activation, "gelu_pytorch_tanh")
    return activation


def refuse_bias(meta: Metadata) -> None:
    """Raise if a config.json asks for biases, in a family whose models have none."""
    if meta.get("attention_bias", bool, False):
        refuse("attention_bias", True, "false")


def is_sliding(meta: Metadata, count: int, default: Callable[[int], bool]) -> list[bool]:
    """By layer, from `layer_types` of config.json, or by the family's `default` of layer i."""
    kinds = meta.get("layer_types", list, None)
    if kinds is None:
        return [default(i) for i in range(count)]
    if len(kinds) != count:
        raise WeightsError(f"layer_types has {len(kinds)} entries, num_hidden_layers is {count}")
    for kind in kinds:
        if kind not in ("full_attention", "sliding_attention"):
            refuse("layer_types", kind, "full_attention, sliding_attention")
    return [kind == "sliding_attention" for kind in kinds]


def half_split(num_heads: int) -> Transform:
    """Undo the row order that some GGUF architectures use for interleaved RoPE: pairs back to halves."""

    def transform(rows: np.ndarray) -> np.ndarray:  # [heads * D, H], or a bias [heads * D]
        return rows.reshape(num_heads, -1, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)

    return transform


def plus_one(weight: np.ndarray) -> np.ndarray:
    """Hugging Face stores a gemma norm's scale minus one; GGUF files already hold the whole scale."""
    return weight + np.float32(1)


def rules(
    format: str,
    config: ModelConfig,
    names: Mapping[str, str] = {},
    *,
    interleaved: bool = False,
    norm: Transform | None = None,
    fused: bool = False,
) -> list[WeightRule]:
    """Every parameter of the decoder of `config`, from a file of `format`.

    `names` are those that differ from HF and GGUF below. `interleaved`: q and k are in the order of GGUF's
    interleaved RoPE. `norm` is done to norm scales. `fused`: qkv is one tensor, and gate_up.
    """
    H, I, V, D = config.hidden_size, config.intermediate_size, config.vocab_size, config.head_dim  # noqa: E741
    N, K, L, moe = config.num_heads, config.num_kv_heads, config.num_layers, config.moe
    q, kv = N * D, K * D
    gguf = format == "gguf"
    n = {**(GGUF if gguf else HF), **names}
    at = "blk.{}." if gguf else "model.layers.{}."
    q_order, k_order = (half_split(N), half_split(K)) if interleaved else (None, None)
    out: list[WeightRule] = []

    def one(param: str, part: Part) -> None:
        out.append(WeightRule(param, part.shape, (replace(part, name=n[part.name]),)))

    def stacked(param: str, *parts: Part) -> None:
        out.append(stack_layers("layers." + param, L, [replace(p, name=at + n[p.name]) for p in parts]))

    def linear(param: str, *parts: Part, bias: bool = False) -> None:
        stacked(param + ".weight", *parts)
        if bias:
            name = lambda part: at + n[part.name].removesuffix("weight") + "bias"
            biases = [replace(part, name=name(part), shape=part.shape[:1]) for part in parts]
            out.append(stack_layers(f"layers.{param}.bias", L, biases))

    def scale(param: str, size: int = H) -> None:
        stacked(param + ".weight", Part(param.split(".")[-1], (size,), norm))

    def experts(param: str, name: str, rows: int, columns: int) -> None:
        assert moe is not None
        shape = (L * moe.num_experts, rows, columns)
        if "{expert}" in n[name]:
            parts = [
                Part((at + n[name]).format(i, expert=e), (rows, columns))
                for i in range(L) for e in range(moe.num_experts)
            ]  # fmt: skip
        else:
            parts = [Part((at + n[name]).format(i), (moe.num_experts, rows, columns)) for i in range(L)]
        out.append(WeightRule(f"layers.mlp.{param}.weight", shape, tuple(parts)))
        if moe.expert_bias:
            bias = lambda part: part.name.removesuffix("weight") + "bias"
            biases = [replace(part, name=bias(part), shape=part.shape[:-1]) for part in parts]
            out.append(WeightRule(f"layers.mlp.{param}.bias", shape[:-1], tuple(biases)))

    one("embedding.weight", Part("embedding", (V, H)))
    if config.pre_norms:
        scale("attention_norm")
    qkv = [Part("q", (q, H), q_order), Part("k", (kv, H), k_order), Part("v", (kv, H))]
    linear("attention.qkv", *([Part("qkv", (q + 2 * kv, H))] if fused else qkv), bias=config.qkv_bias)
    if config.qk_norm:
        scale("attention.q_norm", q if config.wide_qk_norm else D)
        scale("attention.k_norm", kv if config.wide_qk_norm else D)
    if config.attention_sinks:
        stacked("attention.sinks", Part("sinks", (N,)))
    linear("attention.out", Part("out", (H, q)), bias=config.out_bias)
    if config.post_norms:
        scale("post_attention_norm")
    if config.pre_norms:
        scale("mlp_norm")
    if moe is None:
        gate_up = [Part("gate", (I, H)), Part("up", (I, H))]
        linear("mlp.gate_up", *([Part("gate_up", (2 * I, H))] if fused else gate_up), bias=config.mlp_bias)
        linear("mlp.down", Part("down", (H, I)), bias=config.mlp_bias)
    else:
        linear("mlp.router", Part("router", (moe.num_experts, H)), bias=moe.router_bias)
        experts("gate", "expert_gate", moe.expert_size, H)
        experts("up", "expert_up", moe.expert_size, H)
        experts("down", "expert_down", H, moe.expert_size)
        if moe.shared_size:
            S = moe.shared_size
            linear("mlp.shared.gate_up", Part("shared_gate", (S, H)), Part("shared_up", (S, H)))
            linear("mlp.shared.down", Part("shared_down", (H, S)))
            stacked("mlp.shared_router.weight", Part("shared_router", (H,) if gguf else (1, H)))
            out[-1] = replace(out[-1], shape=(L, 1, H))
    if config.post_norms:
        scale("post_mlp_norm")
    one("final_norm.weight", Part("final_norm", (H,), norm))
    if not config.tie_embeddings:
        one("lm_head.weight", Part("lm_head", (V, H)))
    return out


def ignored(format: str, config: ModelConfig) -> frozenset[str]:
    """Tensors that a file may carry and that are not needed, or that went into the configuration."""
    if format == "gguf":
        return frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
    inv_freq = {f"model.layers.{i}.self_attn.rotary_emb.inv_freq" for i in range(config.num_layers)}
    return frozenset(inv_freq | ({"lm_head.weight"} if config.tie_embeddings else set()))
