"""The shape of a decoder, whatever family it comes from."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from jaxserve.errors import ConfigError, WeightsError


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer. `window` None attends to the whole context."""

    window: int | None
    rope_theta: float


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer. Made by a family's translation, stored in converted checkpoints.

    Raises WeightsError for figures that no decoder can have.
    """

    family: str  # "llama", "gemma3"
    vocab_size: int  # rows of the embedding
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int  # context length the model was trained for
    rms_norm_eps: float
    attention_scale: float
    activation: str  # "silu", "gelu_tanh"
    tie_embeddings: bool
    embedding_scale: float | None  # embeddings are multiplied by it (gemma)
    qk_norm: bool  # RMS norm on each query and key head (gemma3)
    post_norms: bool  # norms after attention and MLP too (gemma3)
    layers: tuple[LayerConfig, ...]

    def __post_init__(self) -> None:
        for name in (
            "vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim",
            "max_position", "num_layers",
        ):  # fmt: skip
            _require(name, value := getattr(self, name), isinstance(value, int) and value >= 1, "at least 1")
        _require("head_dim", self.head_dim, self.head_dim % 2 == 0, "even, for RoPE turns pairs")
        _require(
            "num_heads", self.num_heads, self.num_heads % self.num_kv_heads == 0,
            f"a multiple of num_kv_heads, {self.num_kv_heads}",
        )  # fmt: skip
        for layer in self.layers:
            _require("rope_theta", layer.rope_theta, 0 < layer.rope_theta < math.inf, "a number above 0")
            _require("window", layer.window, layer.window is None or layer.window >= 1, "at least 1")
        for name in ("rms_norm_eps", "attention_scale"):
            _require(name, value := getattr(self, name), 0 < value < math.inf, "a number above 0")

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> ModelConfig:
        """Inverse of `to_json`. Raises ConfigError that names a missing or unknown key."""
        try:
            layers = tuple(LayerConfig(**layer) for layer in data["layers"])
            return cls(**{**data, "layers": layers})
        except (KeyError, TypeError, WeightsError) as error:
            raise ConfigError(f"model config: {error}") from error


def _require(name: str, value: object, holds: bool, wanted: str) -> None:
    if not holds:
        raise WeightsError(f"the model's {name} is {value!r}, it must be {wanted}")
