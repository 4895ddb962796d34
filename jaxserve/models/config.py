"""The shape of a decoder, whatever family it comes from."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from jaxserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What may differ from layer to layer. `window` None attends to the whole context."""

    window: int | None
    rope_theta: float


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder-only transformer. Made by a family's translation, stored in converted checkpoints."""

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
        except (KeyError, TypeError) as error:
            raise ConfigError(f"model config: {error}") from error
