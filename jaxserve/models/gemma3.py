"""The gemma3 family (text): alternating sliding windows, two RoPE bases, q/k norms, norms on both sides."""

from __future__ import annotations

from jaxserve.models import standard
from jaxserve.models.config import LayerConfig, ModelConfig
from jaxserve.models.family import WeightRule
from jaxserve.models.metadata import Metadata, refuse
from jaxserve.models.names import CAPPED, SANDWICH
from jaxserve.models.rope_metadata import Rope, rope_from_gguf, rope_from_hf
from jaxserve.models.standard import ignored  # noqa: F401 - a part of the family
from jaxserve.weights.source import TensorSource

name = "gemma3"
gguf_architectures = ("gemma3",)
hf_architectures = ("Gemma3ForCausalLM",)

ROPE_THETA, LOCAL_ROPE_THETA = 1_000_000.0, 10_000.0
DEFAULT_PATTERN = 6  # every sixth layer attends to the whole context


def config(source: TensorSource) -> ModelConfig:
    """ModelConfig from GGUF keys or from config.json."""
    meta = Metadata(source.metadata)
    return _from_gguf(meta, source) if source.format == "gguf" else _from_hf(meta)


def _layers(sliding: list[bool], window: int, rope: Rope, local_theta: float) -> tuple[LayerConfig, ...]:
    local, whole = LayerConfig(window, local_theta), LayerConfig(None, rope.theta, rope.scaling)
    return tuple(local if one else whole for one in sliding)


def _from_gguf(meta: Metadata, source: TensorSource) -> ModelConfig:
    key = "gemma3."
    num_layers, hidden = meta.need(key + "block_count", int), meta.need(key + "embedding_length", int)
    heads = meta.need(key + "attention.head_count", int)
    head_dim = meta.need(key + "attention.key_length", int)
    # GGUF has no key for the query scale; the 27B model, alone, scales by hidden / heads.
    scaled_dim = hidden // heads if num_layers == 62 else head_dim
    pattern = meta.get(key + "attention.sliding_window_pattern", int, DEFAULT_PATTERN)
    return standard.from_gguf(
        meta, source, name, "gemma3", reads=CAPPED, activation="gelu_tanh", qk_norm=True,
        embedding_scale=hidden**0.5, post_norms=True, attention_scale=scaled_dim**-0.5,
        attention_soft_cap=meta.get(key + "attn_logit_softcapping", float, 0.0) or None,
        logit_soft_cap=meta.get(key + "final_logit_softcapping", float, 0.0) or None,
        layers=_layers(
            [(i + 1) % pattern != 0 for i in range(num_layers)],
            meta.need(key + "attention.sliding_window", int),
            rope_from_gguf(meta, source, "gemma3", head_dim, theta=ROPE_THETA),
            meta.get(key + "rope.freq_base_swa", float, LOCAL_ROPE_THETA),
        ),
    )  # fmt: skip


def _from_hf(meta: Metadata) -> ModelConfig:
    standard.refuse_bias(meta)
    if meta.get("use_bidirectional_attention", bool, False):
        refuse("use_bidirectional_attention", True, "false")
    head_dim, num_layers = meta.get("head_dim", int, 256), meta.need("num_hidden_layers", int)
    local_theta = meta.get("rope_local_base_freq", float, LOCAL_ROPE_THETA)
    nested = None
    if by_kind := meta.get("rope_parameters", dict, {}):
        # Newer files: one set of RoPE parameters for each kind of layer.
        kinds = Metadata(by_kind)
        nested, local = kinds.need("full_attention", dict), Metadata(kinds.need("sliding_attention", dict))
        Metadata(nested).need("rope_theta", float)
        local_theta = local.need("rope_theta", float)
        if (kind := local.get("rope_type", str, "default")) != "default":
            refuse("rope_parameters.sliding_attention.rope_type", kind, "default (unscaled)")
    pattern = meta.get("sliding_window_pattern", int, DEFAULT_PATTERN)
    return standard.from_hf(
        meta, name, activation=standard.gemma_activation(meta), head_dim=256, tie_embeddings=True,
        embedding_scale=meta.need("hidden_size", int) ** 0.5, qk_norm=True, post_norms=True,
        attention_scale=meta.get("query_pre_attn_scalar", float, 256.0) ** -0.5,
        attention_soft_cap=meta.get("attn_logit_softcapping", float, None),
        logit_soft_cap=meta.get("final_logit_softcapping", float, None),
        layers=_layers(
            standard.is_sliding(meta, num_layers, lambda i: (i + 1) % pattern != 0),
            meta.need("sliding_window", int),
            rope_from_hf(meta, head_dim, theta=ROPE_THETA, nested=nested),
            local_theta,
        ),
    )  # fmt: skip


def rules(format: str, config: ModelConfig) -> list[WeightRule]:
    """Every parameter of the decoder, with its tensors' names in a file of `format`."""
    if format == "gguf":
        return standard.rules(format, config)
    return standard.rules(format, config, SANDWICH, norm=standard.plus_one)
