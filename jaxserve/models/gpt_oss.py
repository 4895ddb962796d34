"""The gpt-oss family: experts with biases and a clamped gate, attention with sinks, every other a window."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jaxserve.models import standard
from jaxserve.models.config import ModelConfig, MoEConfig
from jaxserve.models.family import Part, WeightRule
from jaxserve.models.metadata import Metadata, refuse
from jaxserve.models.rope_metadata import rope_from_gguf
from jaxserve.models.standard import ignored  # noqa: F401 - a part of the family
from jaxserve.ops.gate import SWIGLU_LIMIT
from jaxserve.weights.source import TensorSource

name = "gpt-oss"
gguf_architectures = ("gpt-oss",)
hf_architectures = ("GptOssForCausalLM",)

_GGUF_NAMES = {"mlp_norm": "post_attention_norm.weight"}
_HF_NAMES = {"router": "mlp.router.weight", "sinks": "self_attn.sinks"}
_THETA = 150_000.0
_EXPERTS = "model.layers.{}.mlp.experts."


def config(source: TensorSource) -> ModelConfig:
    """ModelConfig from GGUF keys or from config.json."""
    meta = Metadata(source.metadata)
    if source.format == "gguf":
        return _from_gguf(meta, source)
    if (limit := meta.get("swiglu_limit", float, SWIGLU_LIMIT)) != SWIGLU_LIMIT:
        refuse("swiglu_limit", limit, str(SWIGLU_LIMIT))
    moe = MoEConfig(
        meta.need("num_local_experts", int), meta.need("num_experts_per_tok", int),
        meta.need("intermediate_size", int), normalise=True, router_bias=True, expert_bias=True,
    )  # fmt: skip
    bias = meta.get("attention_bias", bool, True)
    plain = standard.from_hf(
        meta, name, theta=_THETA, head_dim=64, qkv_bias=bias, out_bias=bias, attention_sinks=True, moe=moe
    )
    window = meta.get("sliding_window", int, 128)
    sliding = standard.is_sliding(meta, plain.num_layers, lambda i: i % 2 == 0)
    # config.json names the activation "silu", the gate's formula isn't in it.
    return standard.windowed(plain, lambda i: window if sliding[i] else None, activation="swiglu_oai")


def _from_gguf(meta: Metadata, source: TensorSource) -> ModelConfig:
    """GGUF has no key for the limit of the gate, nor for where YaRN's ramp ends: those of the models."""
    key = "gpt-oss."
    moe = MoEConfig(
        meta.need(key + "expert_count", int), meta.need(key + "expert_used_count", int),
        meta.need(key + "expert_feed_forward_length", int), normalise=True, router_bias=True,
        expert_bias=True,
    )  # fmt: skip
    rope = rope_from_gguf(
        meta, source, name, meta.need(key + "attention.key_length", int), theta=_THETA, truncate=False
    )
    window = meta.need(key + "attention.sliding_window", int)
    for other, wanted in (("attention.sliding_window_pattern", 2), ("rope.freq_base_swa", rope.theta)):
        if (value := meta.get(key + other, object, wanted)) != wanted:
            refuse(key + other, value, f"{wanted}, or no such key")
    layers = standard.layers(
        meta.need(key + "block_count", int), rope, lambda i: window if i % 2 == 0 else None
    )
    return standard.from_gguf(
        meta, source, name, name, reads=("attention.sliding_window",), layers=layers,
        max_position=rope.max_position, attention_sinks=True, moe=moe, activation="swiglu_oai",
    )  # fmt: skip


def rules(format: str, config: ModelConfig) -> list[WeightRule]:
    """Every parameter of the decoder, with its tensors' names in a file of `format`."""
    if format == "gguf":
        return standard.rules(format, config, _GGUF_NAMES)
    experts = {rule.param: rule for rule in _experts(config)}
    return [experts.get(rule.param, rule) for rule in standard.rules(format, config, _HF_NAMES)]


def _experts(config: ModelConfig) -> list[WeightRule]:
    """Experts [E, in, out] of one tensor a layer; gate and up are in turns along the last axis."""
    assert config.moe is not None
    L, E, H, I = config.num_layers, config.moe.num_experts, config.hidden_size, config.moe.expert_size  # noqa: E741
    out: list[WeightRule] = []

    def both(param: str, tensor: str, size_in: int, width: int, columns: slice) -> None:
        """The rules of a matrix and its bias, `columns` of a tensor of `width`."""
        rows = len(range(width)[columns])
        weight = Part(
            _EXPERTS + tensor, (E, size_in, width), lambda w: np.swapaxes(w[..., columns], 1, 2),
            made=(E, rows, size_in), by_row=True,
        )  # fmt: skip
        bias = Part(
            _EXPERTS + tensor + "_bias", (E, width), lambda b: b[:, columns], made=(E, rows), by_row=True
        )
        for kind, part in (("weight", weight), ("bias", bias)):
            assert part.made is not None
            shape = (L * E, *part.made[1:])
            parts = tuple(replace(part, name=part.name.format(i)) for i in range(L))
            out.append(WeightRule(f"layers.mlp.{param}.{kind}", shape, parts))

    both("gate", "gate_up_proj", H, 2 * I, slice(0, None, 2))
    both("up", "gate_up_proj", H, 2 * I, slice(1, None, 2))
    both("down", "down_proj", I, H, slice(None))
    return out
