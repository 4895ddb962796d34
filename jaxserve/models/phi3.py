"""The phi3 family, phi-4 and phi-4-mini included: fused projections, LongRoPE, RoPE on a part of a head."""

from __future__ import annotations

from jaxserve.models import standard
from jaxserve.models.config import ModelConfig
from jaxserve.models.family import WeightRule
from jaxserve.models.metadata import Metadata
from jaxserve.models.standard import ignored  # noqa: F401 - a part of the family
from jaxserve.weights.source import TensorSource

name = "phi3"
gguf_architectures = ("phi3",)
hf_architectures = ("Phi3ForCausalLM",)


def config(source: TensorSource) -> ModelConfig:
    """ModelConfig from GGUF keys or from config.json."""
    meta = Metadata(source.metadata)
    if source.format == "gguf":
        rotary_dim = meta.need("phi3.rope.dimension_count", int)
        plain = standard.from_gguf(
            meta, source, name, "phi3", ("attention.sliding_window",), rotary_dim=rotary_dim
        )
        window = meta.get("phi3.attention.sliding_window", int, 0)
    else:
        head_dim = meta.need("hidden_size", int) // meta.need("num_attention_heads", int)
        nested = Metadata(meta.get("rope_parameters", dict, {}))
        part = meta.get("partial_rotary_factor", float, nested.get("partial_rotary_factor", float, 1.0))
        plain = standard.from_hf(meta, name, rotary_dim=int(head_dim * part))
        standard.refuse_bias(meta)
        window = meta.get("sliding_window", int, 0)
    return standard.windowed(plain, lambda i: window or None)


def rules(format: str, config: ModelConfig) -> list[WeightRule]:
    """Every parameter of the decoder, with its tensors' names in a file of `format`."""
    return standard.rules(format, config, fused=True)
