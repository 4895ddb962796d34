"""A model family as data: how to read its configuration, and which tensors make which parameter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from jaxserve.models.config import ModelConfig
from jaxserve.weights.source import TensorSource


@dataclass(frozen=True, slots=True)
class Part:
    """One source tensor: its name in the file, its shape there, and what to do to it (float32 in and out)."""

    name: str
    shape: tuple[int, ...]
    transform: Callable[[np.ndarray], np.ndarray] | None = None


@dataclass(frozen=True, slots=True)
class WeightRule:
    """One parameter of the decoder: its flat name, its shape, and its parts, joined along axis 0.

    Fused projections are the only parameters of several parts: qkv is [q; k; v], gate_up is [gate; up].
    """

    param: str  # "layers.3.attention.qkv.weight"
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


class Family(Protocol):
    """What a module under `models/` provides for the registry."""

    name: str  # ModelConfig.family
    gguf_architectures: tuple[str, ...]  # values of general.architecture
    hf_architectures: tuple[str, ...]  # values of config.json's "architectures"

    def config(self, source: TensorSource) -> ModelConfig:
        """Translate the file's description. Raises WeightsError that names an unsupported option."""
        ...

    def rules(self, format: str, config: ModelConfig) -> list[WeightRule]:
        """Every parameter, in a streaming-friendly order."""
        ...

    def ignored(self, format: str, config: ModelConfig) -> frozenset[str]:
        """Names that may stand in the file and are not needed, such as a tied lm_head or RoPE tables."""
        ...
