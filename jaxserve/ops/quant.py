"""Weight-only int8: matrices as whole numbers with scales.

A row of K weights is cut into groups of G; each has a float32 scale, the largest magnitude of its weights
over 127, and a weight is the nearest multiple of it. Groups of 32 that were quantised before (a 4-bit file's)
take a larger scale that divides their old step, where that is nearer in squares.
`int8` takes groups of 32, `int8-channel` one group a row. Groups follow outliers, at 4 bytes of scale for 32
of values; a scale a row is the cheaper product.
Activations are not quantised, nor what is small or picks experts: vectors, norms, biases, routers.
Source: Dettmers et al. 2022, arXiv:2208.07339, section 2.1 (absmax quantisation).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxserve.errors import ConfigError

GROUPS: dict[str, int | None] = {"int8": 32, "int8-channel": None}  # weights that share a scale; None: a row
BLOCK_ELEMENTS = 1 << 16  # quantised at a time: temporaries stay in L2
LATTICE_GROUP = 32  # weights at most that are looked at for a common step: a row spans blocks of a file
LATTICE_PARTS = 16  # that a step is cut into at most
LARGEST = 127  # -128 is not used: a weight and its negative are equally near
WEIGHT, SCALE = ".weight", ".scale"
FLOAT = ("norm.weight", "router.weight")  # ends of names of what stays as it is


class Int8[A: (jax.Array, np.ndarray)](NamedTuple):
    """A matrix, or matrices, values * scales.

    Or in the order of the native kernels, scales included: `values` is int8 [..., N, W] then, `scales` empty.
    """

    values: A  # int8 [..., N, K]
    scales: A  # float32 [..., N, K / G]

    @property
    def is_packed(self) -> bool:
        return self.scales.size == 0


Matrix = jax.Array | Int8[jax.Array]  # what a dense layer multiplies by


def is_quantised(param: str, shape: Sequence[int]) -> bool:
    """Whether a parameter of this name and shape becomes int8 where any does: the weights of dense layers."""
    return len(shape) > 1 and param.endswith(WEIGHT) and not param.endswith(FLOAT)


def scale_name(param: str) -> str:
    """The name of the scales that go with a weight."""
    return param.removesuffix(WEIGHT) + SCALE


def scale_shape(param: str, shape: Sequence[int], quantization: str) -> tuple[int, ...]:
    """[..., N, K / G] of a weight [..., N, K]. Raises ConfigError where groups don't fill its rows."""
    group = GROUPS[quantization] or shape[-1]
    if shape[-1] % group:
        raise ConfigError(
            f"quantization={quantization}: {param} has rows of {shape[-1]} weights, no whole "
            f"groups of {group}: use int8-channel"
        )
    return (*shape[:-1], shape[-1] // group)


def quantise_into(rows: np.ndarray, out: Int8[np.ndarray]) -> None:
    """Write float weights [..., K] to `out`, whose scales say the groups.

    A group with a weight that is not finite becomes NaN. It takes blocks of rows, to need little memory.
    """
    rows = rows.reshape(-1, rows.shape[-1])
    values, scales = (array.reshape(len(rows), -1) for array in out)  # views: both are contiguous
    block = max(1, BLOCK_ELEMENTS // rows.shape[1])
    for start in range(0, len(rows), block):
        part = slice(start, start + block)
        _quantise_block(rows[part], values[part], scales[part])


def _quantise_block(rows: np.ndarray, values: np.ndarray, scales: np.ndarray) -> None:
    groups = rows.astype(np.float32, copy=False).reshape(*scales.shape, -1)
    # Of what is not finite, the scale says so; where no step is found, a quotient is not finite either.
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        np.divide(np.abs(groups).max(axis=-1), np.float32(LARGEST), out=scales)
        quotients = _nearest(groups, scales)
        if groups.shape[-1] <= LATTICE_GROUP:
            coarser = _lattice_scales(groups, scales)
            tried = _nearest(groups, coarser)
            better = _squared_error(groups, tried, coarser) < _squared_error(groups, quotients, scales)
            np.copyto(scales, coarser, where=better)
            np.copyto(quotients, tried, where=better[..., None])
        values[...] = quotients.reshape(rows.shape)


def _nearest(groups: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The whole numbers [..., G], as floats, whose multiples of the scales [...] are nearest."""
    # The scale of zeros is 0, and what they are divided by then of no matter.
    quotients = groups / np.where(scales == 0, 1, scales)[..., None]
    np.rint(quotients, out=quotients)
    # A scale below 2^-126 is inexact: quotients may be too large then.
    return np.clip(quotients, -LARGEST, LARGEST, out=quotients)


def _squared_error(groups: np.ndarray, quotients: np.ndarray, scales: np.ndarray) -> np.ndarray:
    off = quotients * scales[..., None] - groups
    return np.einsum("...g,...g->...", off, off)


def _lattice_scales(groups: np.ndarray, absmax: np.ndarray) -> np.ndarray:
    """Scales [...] that suit weights of the form least + step * whole number; 0 where none was found.

    Weights that were quantised before, to 4 bits say, are such. A scale of step / k has all of them equally
    far from its multiples: the k that brings the least one nearest does so for all. Of k up to n, one is
    within 1 / (n + 1) of the scale (Dirichlet), where rounding to the absmax scale is off by up to a half.
    """
    ordered = np.sort(groups, axis=-1)
    least, span = ordered[..., 0], ordered[..., -1] - ordered[..., 0]
    gaps = ordered[..., 1:] - ordered[..., :-1]
    # Sums in float32 that should be equal may differ in the last bits: that is no gap.
    gaps[gaps <= absmax[..., None] / 4] = np.inf
    step = gaps.min(axis=-1)
    steps = np.rint(span / step)
    step = span / np.where(steps > 0, steps, np.nan)  # of the whole span: the rounding of one gap is gone
    best, off = np.zeros_like(absmax), np.full_like(absmax, np.inf)
    for k in range(1, LATTICE_PARTS + 1):
        scale = step / np.float32(k)
        error = np.abs(least - np.rint(least / scale) * scale)
        fits = (scale >= absmax * np.float32(1 - 1e-6)) & (error < off)
        best, off = np.where(fits, scale, best), np.where(fits, error, off)
    return best


def quantise(weights: np.ndarray, quantization: str, param: str = "weight") -> Int8[np.ndarray]:
    """`weights` [..., N, K] in int8. Errors as `scale_shape`'s."""
    out: Int8[np.ndarray] = Int8(
        np.empty(weights.shape, np.int8),
        np.empty(scale_shape(param, weights.shape, quantization), np.float32),
    )
    quantise_into(weights, out)
    return out


def dequantise(weight: Int8[jax.Array], dtype: DTypeLike = jnp.float32) -> jax.Array:
    """values * scales [..., N, K], computed in float32, in `dtype`."""
    K = weight.values.shape[-1]
    scales = jnp.repeat(weight.scales, K // weight.scales.shape[-1], axis=-1)
    return (weight.values.astype(jnp.float32) * scales).astype(dtype)


def quantised_rows(weight: Int8[jax.Array], numbers: jax.Array) -> jax.Array:
    """Float32 [..., K]: rows of one matrix [N, K] by their `numbers` [...]."""
    return dequantise(Int8(weight.values[numbers], weight.scales[numbers]))
