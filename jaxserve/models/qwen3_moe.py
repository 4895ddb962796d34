"""The qwen3-moe family: a qwen3 with experts."""

from __future__ import annotations

from jaxserve.models import standard
from jaxserve.models.config import ModelConfig, MoEConfig
from jaxserve.models.family import WeightRule
from jaxserve.models.metadata import Metadata
from jaxserve.models.standard import ignored  # noqa: F401 - a part of the family
from jaxserve.weights.source import TensorSource

name = "qwen3moe"
gguf_architectures = ("qwen3moe",)
hf_architectures = ("Qwen3MoeForCausalLM",)


def config(source: TensorSource) -> ModelConfig:
    """ModelConfig from GGUF keys or from config.json."""
    meta = Metadata(source.metadata)
    if source.format == "gguf":
        moe = MoEConfig(
            meta.need("qwen3moe.expert_count", int), meta.need("qwen3moe.expert_used_count", int),
            meta.need("qwen3moe.expert_feed_forward_length", int), normalise=True,
        )  # fmt: skip
        return standard.from_gguf(meta, source, name, "qwen3moe", qk_norm=True, moe=moe)
    bias, moe = meta.get("attention_bias", bool, False), standard.qwen_experts(meta)
    plain = standard.from_hf(
        meta, name, qk_norm=True, head_dim=128, qkv_bias=bias, out_bias=bias, moe=moe
    )
    return standard.qwen_windows(meta, plain)


def rules(format: str, config: ModelConfig) -> list[WeightRule]:
    """Every parameter of the decoder, with its tensors' names in a file of `format`."""
    return standard.rules(format, config)
