"""The granite family: a llama with four multipliers."""

from __future__ import annotations

from jaxserve.models import standard
from jaxserve.models.config import ModelConfig
from jaxserve.models.family import WeightRule
from jaxserve.models.metadata import Metadata
from jaxserve.models.standard import ignored  # noqa: F401 - a part of the family
from jaxserve.weights.source import TensorSource

name = "granite"
gguf_architectures = ("granite",)
hf_architectures = ("GraniteForCausalLM",)

_MULTIPLIERS = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")


def config(source: TensorSource) -> ModelConfig:
    """ModelConfig from GGUF keys or from config.json."""
    meta = Metadata(source.metadata)
    if source.format == "gguf":
        return standard.from_gguf(
            meta, source, name, "granite", _MULTIPLIERS,
            embedding_scale=meta.need("granite.embedding_scale", float),
            residual_scale=meta.need("granite.residual_scale", float),
            attention_scale=meta.need("granite.attention.scale", float),
            logit_scale=1 / meta.need("granite.logit_scale", float),
        )  # fmt: skip
    bias, mlp_bias = meta.get("attention_bias", bool, False), meta.get("mlp_bias", bool, False)
    return standard.from_hf(
        meta, name, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias,
        embedding_scale=meta.get("embedding_multiplier", float, 1.0),
        residual_scale=meta.get("residual_multiplier", float, 1.0),
        attention_scale=meta.get("attention_multiplier", float, 1.0),
        logit_scale=1 / meta.get("logits_scaling", float, 1.0),
    )  # fmt: skip


def rules(format: str, config: ModelConfig) -> list[WeightRule]:
    """Every parameter of the decoder, with its tensors' names in a file of `format`."""
    return standard.rules(format, config, interleaved=format == "gguf")
