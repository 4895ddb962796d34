"""The mixtral family: a mistral with experts. GGUF files call it a llama."""

from __future__ import annotations

from jaxserve.models import standard
from jaxserve.models.config import ModelConfig, MoEConfig
from jaxserve.models.family import WeightRule
from jaxserve.models.metadata import Metadata
from jaxserve.models.standard import ignored  # noqa: F401 - a part of the family
from jaxserve.weights.source import TensorSource

name = "mixtral"
gguf_architectures = ()
hf_architectures = ("MixtralForCausalLM",)

_EXPERT = "block_sparse_moe.experts.{expert}."
_NAMES = {
    "router": "block_sparse_moe.gate.weight",
    "expert_gate": _EXPERT + "w1.weight",
    "expert_up": _EXPERT + "w3.weight",
    "expert_down": _EXPERT + "w2.weight",
}


def config(source: TensorSource) -> ModelConfig:
    """ModelConfig from config.json."""
    meta = Metadata(source.metadata)
    plain, window = standard.from_hf(meta, name), meta.get("sliding_window", int, None)
    moe = MoEConfig(
        meta.need("num_local_experts", int), meta.need("num_experts_per_tok", int),
        plain.intermediate_size, normalise=True,
    )  # fmt: skip
    return standard.windowed(plain, lambda i: window, moe=moe)


def rules(format: str, config: ModelConfig) -> list[WeightRule]:
    """Every parameter of the decoder, with its tensors' names in a file of `format`."""
    return standard.rules(format, config, _NAMES)
