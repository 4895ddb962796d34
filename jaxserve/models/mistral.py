"""The mistral family: a llama whose layers may all have a sliding window. GGUF files call it a llama."""

from __future__ import annotations

from jaxserve.models import standard
from jaxserve.models.config import ModelConfig
from jaxserve.models.family import WeightRule
from jaxserve.models.metadata import Metadata
from jaxserve.models.standard import ignored  # noqa: F401 - a part of the family
from jaxserve.weights.source import TensorSource

name = "mistral"
gguf_architectures = ()
hf_architectures = ("MistralForCausalLM",)


def config(source: TensorSource) -> ModelConfig:
    """ModelConfig from config.json."""
    meta = Metadata(source.metadata)
    window = meta.get("sliding_window", int, None)
    return standard.windowed(standard.from_hf(meta, name), lambda i: window)


def rules(format: str, config: ModelConfig) -> list[WeightRule]:
    """Every parameter of the decoder, with its tensors' names in a file of `format`."""
    return standard.rules(format, config)
