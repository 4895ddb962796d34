"""The olmo2 family: norms behind attention and MLP alone, and over all query or key heads at once."""

from __future__ import annotations

from typing import Any

from jaxserve.models import standard
from jaxserve.models.config import ModelConfig
from jaxserve.models.family import WeightRule
from jaxserve.models.metadata import Metadata
from jaxserve.models.standard import ignored  # noqa: F401 - a part of the family
from jaxserve.weights.source import TensorSource

name = "olmo2"
gguf_architectures = ("olmo2",)
hf_architectures = ("Olmo2ForCausalLM",)

_NAMES = {
    "post_attention_norm": "post_attention_layernorm.weight",
    "post_mlp_norm": "post_feedforward_layernorm.weight",
}


def config(source: TensorSource) -> ModelConfig:
    """ModelConfig from GGUF keys or from config.json."""
    meta = Metadata(source.metadata)
    changes: dict[str, Any] = {"qk_norm": True, "wide_qk_norm": True, "pre_norms": False, "post_norms": True}
    if source.format == "gguf":
        return standard.from_gguf(meta, source, name, "olmo2", **changes)
    bias = meta.get("attention_bias", bool, False)
    return standard.from_hf(meta, name, theta=500_000.0, qkv_bias=bias, out_bias=bias, **changes)


def rules(format: str, config: ModelConfig) -> list[WeightRule]:
    """Every parameter of the decoder, with its tensors' names in a file of `format`."""
    return standard.rules(format, config, {} if format == "gguf" else _NAMES)
