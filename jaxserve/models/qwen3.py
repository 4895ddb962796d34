"""The qwen3 family: a llama with norms on each query and key head."""

from __future__ import annotations

from jaxserve.models import standard
from jaxserve.models.config import ModelConfig
from jaxserve.models.family import WeightRule
from jaxserve.models.metadata import Metadata
from jaxserve.models.standard import ignored  # noqa: F401 - a part of the family
from jaxserve.weights.source import TensorSource

name = "qwen3"
gguf_architectures = ("qwen3",)
hf_architectures = ("Qwen3ForCausalLM",)


def config(source: TensorSource) -> ModelConfig:
    """ModelConfig from GGUF keys or from config.json."""
    meta = Metadata(source.metadata)
    if source.format == "gguf":
        return standard.from_gguf(meta, source, name, "qwen3", qk_norm=True)
    bias = meta.get("attention_bias", bool, False)
    plain = standard.from_hf(meta, name, qk_norm=True, head_dim=128, qkv_bias=bias, out_bias=bias)
    return standard.qwen_windows(meta, plain)


def rules(format: str, config: ModelConfig) -> list[WeightRule]:
    """Every parameter of the decoder, with its tensors' names in a file of `format`."""
    return standard.rules(format, config)
