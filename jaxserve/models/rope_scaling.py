"""The ways to stretch RoPE over contexts longer than a model was trained for, as factors of its frequencies.

A method is applied once, when the model is read. What depends on the length of the context follows the
longest one that the engine serves, not the request at hand: keys in the cache stay valid, whatever follows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from jaxserve.models.config import LayerConfig, ModelConfig, RopeScaling


def frequencies(dim: int, theta: float) -> np.ndarray:
    """theta^(-2i/dim), float64 [dim / 2]."""
    return theta ** (-np.arange(0, dim, 2) / dim)


def linear(dim: int, factor: float) -> RopeScaling:
    """Positions divided by `factor`. Source: Chen et al. 2023, arXiv:2306.15595."""
    return RopeScaling((float(factor),) * (dim // 2))


def llama3(
    dim: int, theta: float, factor: float, low_freq_factor: float, high_freq_factor: float, original: int
) -> RopeScaling:
    """Long waves divided by `factor`, short ones kept, those between interpolated.

    Source: the Llama 3.1 models' reference code (apply_scaling), figures from each model's config.
    """
    turns = original * frequencies(dim, theta) / (2 * np.pi)  # of each pair over the original context
    kept = np.clip((turns - low_freq_factor) / (high_freq_factor - low_freq_factor), 0, 1)
    return RopeScaling(tuple((1 / ((1 - kept) / factor + kept)).tolist()))


def yarn(
    dim: int,
    theta: float,
    factor: float,
    original: int,
    *,
    beta_fast: float = 32.0,
    beta_slow: float = 1.0,
    truncate: bool = True,
    attention_factor: float | None = None,
) -> RopeScaling:
    """Pairs that turn often kept, those that turn seldom divided by `factor`, a ramp between them.

    Source: Peng et al. 2023, arXiv:2309.00071, sections 3.2 to 3.4.
    """

    def pair_that_turns(times: float) -> float:
        return dim * math.log(original / (times * 2 * math.pi)) / (2 * math.log(theta))

    low, high = pair_that_turns(beta_fast), pair_that_turns(beta_slow)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 0.001), 0, 1)
    if attention_factor is None:
        attention_factor = yarn_magnitude(factor)
    return RopeScaling(tuple((1 / (ramp / factor + 1 - ramp)).tolist()), attention_factor=attention_factor)


def yarn_magnitude(factor: float, weight: float = 1.0) -> float:
    """What YaRN multiplies cosines and sines by."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def longrope(
    short: Sequence[float], long: Sequence[float], original: int, max_position: int,
    attention_factor: float | None = None,
) -> RopeScaling:  # fmt: skip
    """Factors found by search, one set for contexts up to `original`, one beyond.

    Source: Ding et al. 2024, arXiv:2402.13753; the magnitude as in the Phi-3 models' reference code.
    """
    if attention_factor is None:
        factor = max_position / original
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return RopeScaling(
        tuple(map(float, short)), tuple(map(float, long)), attention_factor, original=original
    )


def dynamic(factor: float, original: int) -> RopeScaling:
    """Theta grows with the length of the context ("NTK-aware"), beyond `original`."""
    return RopeScaling(ntk_factor=float(factor), original=original)


def at_length(config: ModelConfig, length: int) -> ModelConfig:
    """`config` for contexts of up to `length` tokens: what depends on it is decided."""
    dim = config.rotary_dim or config.head_dim
    return replace(config, layers=tuple(_layer_at_length(layer, dim, length) for layer in config.layers))


def _layer_at_length(layer: LayerConfig, dim: int, length: int) -> LayerConfig:
    rope, theta = layer.rope, layer.rope_theta
    if rope.original is None or theta is None:
        return layer
    factors = rope.factors
    if length > rope.original:
        if rope.long_factors:
            factors = rope.long_factors
        if rope.ntk_factor is not None:
            stretch = rope.ntk_factor * length / rope.original - (rope.ntk_factor - 1)
            theta *= stretch ** (dim / (dim - 2))
    return LayerConfig(layer.window, theta, RopeScaling(factors, attention_factor=rope.attention_factor))
