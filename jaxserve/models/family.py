"""A model family as data: how to read its configuration, and which tensors make which parameter."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, replace
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
    made: tuple[int, ...] | None = None  # the transform's shape, where it is another
    by_row: bool = False  # the transform may be given some rows at a time, and gives as many
    instead: Part | None = None  # the same from another tensor, in files that have that and not this one

    @property
    def rows_shape(self) -> tuple[int, ...]:
        """What it adds to the parameter."""
        return self.shape if self.made is None else self.made


@dataclass(frozen=True, slots=True)
class WeightRule:
    """One parameter of the decoder: its flat name, its shape, and its parts.

    Parts are joined along axis 0 and then reshaped to `shape`: fused projections (qkv is [q; k; v],
    gate_up is [gate; up]) and all layers of one kind, layer by layer, become one array that way.
    Parameters made of vectors are kept in float32, those made of matrices in the serving dtype.
    """

    param: str  # "layers.attention.qkv.weight"
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def stack_layers(param: str, num_layers: int, parts: list[Part]) -> WeightRule:
    """The rule of a parameter [L, ...]; `parts` are those of one layer, "{}" in a name is its index."""
    rows = sum(part.rows_shape[0] for part in parts)
    return WeightRule(
        param,
        (num_layers, rows, *parts[0].rows_shape[1:]),
        tuple(replace(part, name=part.name.format(i)) for i in range(num_layers) for part in parts),
    )


def fitted(rules: Iterable[WeightRule], names: Container[str]) -> list[WeightRule]:
    """`rules` for a file with tensors of these names: parts it lacks are read from what they know instead."""

    def fit(part: Part) -> Part:
        other = part.instead
        return part if part.name in names or other is None or other.name not in names else other

    return [replace(rule, parts=tuple(fit(part) for part in rule.parts)) for rule in rules]


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
