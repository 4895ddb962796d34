"""The first gemma family: a llama with scaled embeddings, GELU, and wide heads."""

from __future__ import annotations

from jaxserve.models import standard
from jaxserve.models.config import ModelConfig
from jaxserve.models.family import WeightRule
from jaxserve.models.metadata import Metadata
from jaxserve.models.standard import ignored  # noqa: F401 - a part of the family
from jaxserve.weights.source import TensorSource

name = "gemma"
gguf_architectures = ("gemma",)
hf_architectures = ("GemmaForCausalLM",)


def config(source: TensorSource) -> ModelConfig:
    """ModelConfig from GGUF keys or from config.json."""
    meta = Metadata(source.metadata)
    if source.format == "gguf":
        scale = meta.need("gemma.embedding_length", int) ** 0.5
        return standard.from_gguf(
            meta, source, name, "gemma", activation="gelu_tanh", embedding_scale=scale
        )
    return standard.from_hf(
        meta, name, activation=standard.gemma_activation(meta), head_dim=256, tie_embeddings=True,
        embedding_scale=meta.need("hidden_size", int) ** 0.5,
    )  # fmt: skip


def rules(format: str, config: ModelConfig) -> list[WeightRule]:
    """Every parameter of the decoder, with its tensors' names in a file of `format`."""
    return standard.rules(format, config, norm=None if format == "gguf" else standard.plus_one)
