"""The llama family: pre-norm, grouped-query attention, SwiGLU. In GGUF Mistral and Mixtral are llamas."""

from __future__ import annotations

from jaxserve.models import standard
from jaxserve.models.config import ModelConfig, MoEConfig
from jaxserve.models.family import WeightRule
from jaxserve.models.metadata import Metadata
from jaxserve.models.standard import ignored  # noqa: F401 - a part of the family
from jaxserve.weights.source import TensorSource

name = "llama"
gguf_architectures = ("llama",)
hf_architectures = ("LlamaForCausalLM",)


def config(source: TensorSource) -> ModelConfig:
    """ModelConfig from GGUF keys or from config.json."""
    meta = Metadata(source.metadata)
    if source.format != "gguf":
        bias = meta.get("attention_bias", bool, False)
        mlp_bias = meta.get("mlp_bias", bool, False)
        return standard.from_hf(meta, name, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias)
    moe = None
    if num_experts := meta.get("llama.expert_count", int, 0):
        width = meta.need("llama.feed_forward_length", int)
        moe = MoEConfig(num_experts, meta.need("llama.expert_used_count", int), width, normalise=True)
    return standard.from_gguf(meta, source, name, "llama", moe=moe)


def rules(format: str, config: ModelConfig) -> list[WeightRule]:
    """Every parameter of the decoder, with its tensors' names in a file of `format`."""
    return standard.rules(format, config, interleaved=format == "gguf")
