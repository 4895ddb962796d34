"""The qwen2 family, 2.5 included: a llama with biases on queries, keys and values."""

from __future__ import annotations

from jaxserve.models import standard
from jaxserve.models.config import ModelConfig
from jaxserve.models.family import WeightRule
from jaxserve.models.metadata import Metadata
from jaxserve.models.standard import ignored  # noqa: F401 - a part of the family
from jaxserve.weights.source import TensorSource

name = "qwen2"
gguf_architectures = ("qwen2",)
hf_architectures = ("Qwen2ForCausalLM",)


def config(source: TensorSource) -> ModelConfig:
    """ModelConfig from GGUF keys or from config.json."""
    meta = Metadata(source.metadata)
    if source.format == "gguf":
        return standard.from_gguf(meta, source, name, "qwen2", qkv_bias=True)
    return standard.qwen_windows(meta, standard.from_hf(meta, name, qkv_bias=True))


def rules(format: str, config: ModelConfig) -> list[WeightRule]:
    """Every parameter of the decoder, with its tensors' names in a file of `format`."""
    return standard.rules(format, config)
