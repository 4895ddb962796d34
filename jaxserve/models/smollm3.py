"""The smollm3 family: a llama in which every fourth layer has no RoPE."""

from __future__ import annotations

from jaxserve.errors import WeightsError
from jaxserve.models import standard
from jaxserve.models.config import LayerConfig, ModelConfig
from jaxserve.models.family import WeightRule
from jaxserve.models.metadata import Metadata
from jaxserve.models.standard import ignored  # noqa: F401 - a part of the family
from jaxserve.weights.source import TensorSource

name = "smollm3"
gguf_architectures = ("smollm3",)
hf_architectures = ("SmolLM3ForCausalLM",)

NO_ROPE_INTERVAL = 4


def config(source: TensorSource) -> ModelConfig:
    """ModelConfig from GGUF keys or from config.json."""
    meta = Metadata(source.metadata)
    if source.format == "gguf":
        plain = standard.from_gguf(meta, source, name, "smollm3")
        has_rope = _every(NO_ROPE_INTERVAL, plain.num_layers)
        return standard.with_layers(plain, lambda i, layer: layer if has_rope[i] else _without(layer))
    bias, mlp_bias = meta.get("attention_bias", bool, False), meta.get("mlp_bias", bool, False)
    plain = standard.from_hf(
        meta, name, theta=2_000_000.0, tie_embeddings=True, qkv_bias=bias, out_bias=bias, mlp_bias=mlp_bias
    )
    interval = meta.get("no_rope_layer_interval", int, NO_ROPE_INTERVAL)
    has_rope = meta.get("no_rope_layers", list, None) or _every(interval, plain.num_layers)
    if len(has_rope) != plain.num_layers:
        raise WeightsError(
            f"no_rope_layers has {len(has_rope)} entries, num_hidden_layers is {plain.num_layers}"
        )
    plain = standard.with_layers(plain, lambda i, layer: layer if has_rope[i] else _without(layer))
    sliding, window = standard.is_sliding(meta, plain.num_layers, lambda i: False), None
    if meta.get("use_sliding_window", bool, False):
        window = meta.need("sliding_window", int)
    return standard.windowed(plain, lambda i: window if sliding[i] else None)


def _every(interval: int, count: int) -> list[int]:
    """1 for a layer with RoPE, 0 for one without."""
    return [int((i + 1) % interval != 0) for i in range(count)]


def _without(layer: LayerConfig) -> LayerConfig:
    return LayerConfig(layer.window, None)


def rules(format: str, config: ModelConfig) -> list[WeightRule]:
    """Every parameter of the decoder, with its tensors' names in a file of `format`."""
    return standard.rules(format, config, interleaved=format == "gguf")
