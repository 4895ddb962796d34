"""The qwen2-moe family (Qwen1.5-MoE, Qwen2-57B-A14B): experts, and one that all tokens share."""

from __future__ import annotations

from jaxserve.models import standard
from jaxserve.models.config import ModelConfig, MoEConfig
from jaxserve.models.family import WeightRule
from jaxserve.models.metadata import Metadata
from jaxserve.models.standard import ignored  # noqa: F401 - a part of the family
from jaxserve.weights.source import TensorSource

name = "qwen2moe"
gguf_architectures = ("qwen2moe",)
hf_architectures = ("Qwen2MoeForCausalLM",)


def config(source: TensorSource) -> ModelConfig:
    """ModelConfig from GGUF keys or from config.json."""
    meta = Metadata(source.metadata)
    if source.format == "gguf":
        moe = MoEConfig(
            meta.need("qwen2moe.expert_count", int), meta.need("qwen2moe.expert_used_count", int),
            meta.need("qwen2moe.expert_feed_forward_length", int), normalise=False,
            shared_size=meta.need("qwen2moe.expert_shared_feed_forward_length", int),
        )  # fmt: skip
        return standard.from_gguf(meta, source, name, "qwen2moe", qkv_bias=True, moe=moe)
    moe = standard.qwen_experts(meta, shared_size=meta.need("shared_expert_intermediate_size", int))
    return standard.qwen_windows(meta, standard.from_hf(meta, name, qkv_bias=True, moe=moe))


def rules(format: str, config: ModelConfig) -> list[WeightRule]:
    """Every parameter of the decoder, with its tensors' names in a file of `format`."""
    return standard.rules(format, config)
