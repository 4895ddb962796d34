"""The gemma2 family: gemma with soft caps, norms on both sides, and a window in every other layer."""

from __future__ import annotations

from jaxserve.models import standard
from jaxserve.models.config import ModelConfig
from jaxserve.models.family import WeightRule
from jaxserve.models.metadata import Metadata
from jaxserve.models.names import CAPPED, SANDWICH
from jaxserve.models.standard import ignored  # noqa: F401 - a part of the family
from jaxserve.weights.source import TensorSource

name = "gemma2"
gguf_architectures = ("gemma2",)
hf_architectures = ("Gemma2ForCausalLM",)


def config(source: TensorSource) -> ModelConfig:
    """ModelConfig from GGUF keys or from config.json."""
    meta = Metadata(source.metadata)
    if source.format == "gguf":
        hidden, num_layers = meta.need("gemma2.embedding_length", int), meta.need("gemma2.block_count", int)
        heads = meta.need("gemma2.attention.head_count", int)
        # GGUF has no key for the query scale; the 27B model, alone, scales by hidden / heads.
        scaled = hidden // heads if num_layers == 46 else meta.need("gemma2.attention.key_length", int)
        plain = standard.from_gguf(
            meta, source, name, "gemma2", reads=CAPPED, activation="gelu_tanh",
            embedding_scale=hidden**0.5, post_norms=True, attention_scale=scaled**-0.5,
            attention_soft_cap=meta.get("gemma2.attn_logit_softcapping", float, 50.0),
            logit_soft_cap=meta.get("gemma2.final_logit_softcapping", float, 30.0),
        )  # fmt: skip
        window = meta.need("gemma2.attention.sliding_window", int)
        sliding = [i % 2 == 0 for i in range(num_layers)]
    else:
        plain = standard.from_hf(
            meta, name, activation=standard.gemma_activation(meta), head_dim=256, tie_embeddings=True,
            embedding_scale=meta.need("hidden_size", int) ** 0.5, post_norms=True,
            attention_scale=meta.get("query_pre_attn_scalar", float, 256.0) ** -0.5,
            attention_soft_cap=meta.get("attn_logit_softcapping", float, None),
            logit_soft_cap=meta.get("final_logit_softcapping", float, None),
        )  # fmt: skip
        standard.refuse_bias(meta)
        window = meta.need("sliding_window", int)
        sliding = standard.is_sliding(meta, plain.num_layers, lambda i: i % 2 == 0)
    return standard.windowed(plain, lambda i: window if sliding[i] else None)


def rules(format: str, config: ModelConfig) -> list[WeightRule]:
    """Every parameter of the decoder, with its tensors' names in a file of `format`."""
    if format == "gguf":
        return standard.rules(format, config)
    return standard.rules(format, config, SANDWICH, norm=standard.plus_one)
