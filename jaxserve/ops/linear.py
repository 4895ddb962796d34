"""Dense layers over weights kept as [out, in]."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxserve.ops.quant import LARGEST, Int8, Matrix, dequantise


def linear_xla(
    x: jax.Array, weight: Matrix, layer: jax.Array | None = None, *, out_dtype: DTypeLike | None = None
) -> jax.Array:
    """`x` [..., I] times `weight` [O, I] transposed: [..., O], summed in float32, in `out_dtype` or x's.

    With `layer`, an int32 scalar, `weight` is [L, O, I] and that layer's matrix is meant. An int8 weight of
    groups is rounded to x's dtype on the way, one of channels is not.

    XLA's CPU backend turns a bfloat16 dot of one row into a product that widens the whole weight first
    (measured 39 ms against 6 ms for two rows of 2048x8192), so one row is padded to two.
    """
    if layer is not None:
        weight = jax.tree.map(lambda w: jax.lax.dynamic_index_in_dim(w, layer, keepdims=False), weight)
    rows = x.reshape(-1, x.shape[-1])
    num_rows = rows.shape[0]
    if num_rows == 1 and x.dtype == jnp.bfloat16:
        rows = jnp.pad(rows, ((0, 1), (0, 0)))
    out = _int8_product(rows, weight) if isinstance(weight, Int8) else _product(rows, weight)
    return out[:num_rows].astype(out_dtype or x.dtype).reshape(*x.shape[:-1], -1)


def _product(rows: jax.Array, weight: jax.Array, out_dtype: DTypeLike = jnp.float32) -> jax.Array:
    return jax.lax.dot_general(rows, weight, (((1,), (1,)), ((), ())), preferred_element_type=out_dtype)


def _int8_product(rows: jax.Array, weight: Int8[jax.Array]) -> jax.Array:
    """Float32 [B, N] of rows [B, K] and an int8 matrix: what XLA makes least of on each device.

    A scale a channel comes after the product, whose int8 weights XLA widens as it reads them; but on CPU it
    writes them widened first, and a product of int8 rows is 2 to 5 times faster. A scale a group comes before
    it. On CPU one product of a whole matrix beats products of single groups 2 to 10 times.
    """
    exact = rows.dtype == jnp.float32
    if weight.scales.shape[-1] == 1:
        forms = {} if exact else {"cpu": _channels_in_two_terms}
        return jax.lax.platform_dependent(rows, weight, **forms, default=_channels)
    forms = {} if exact else {"tpu": _groups_by_a_product}
    return jax.lax.platform_dependent(rows, weight, **forms, default=_groups)


def _channels(rows: jax.Array, weight: Int8[jax.Array]) -> jax.Array:
    return _product(rows, weight.values.astype(rows.dtype)) * weight.scales[:, 0]


def _groups(rows: jax.Array, weight: Int8[jax.Array]) -> jax.Array:
    return _product(rows, dequantise(weight, rows.dtype))


def _groups_by_a_product(rows: jax.Array, weight: Int8[jax.Array]) -> jax.Array:
    """Scales spread over their groups by a product with zeros and ones, in two terms of bfloat16.

    To repeat values along the lanes of its vector unit takes a TPU longer than all the rest. The compiler's
    estimates for a v6e, 8 rows with [4096, 4096], in thousand cycles: 254 so, 58 here, 46 of bfloat16.
    """
    K = weight.values.shape[-1]
    count = weight.scales.shape[-1]
    of_group = jnp.arange(K) // (K // count) == jnp.arange(2 * count)[:, None] % count  # [2 K / G, K]
    high = weight.scales.astype(jnp.bfloat16)
    low = (weight.scales - high.astype(jnp.float32)).astype(jnp.bfloat16)
    spread = jax.lax.dot_general(
        jnp.concatenate([high, low], axis=-1), of_group.astype(jnp.bfloat16), (((1,), (0,)), ((), ())),
        preferred_element_type=jnp.float32,
    )  # fmt: skip
    return _product(rows, (weight.values.astype(jnp.float32) * spread).astype(rows.dtype))


def _channels_in_two_terms(rows: jax.Array, weight: Int8[jax.Array]) -> jax.Array:
    """The rows as int8 multiples of 1/127 of their largest value, and what that leaves as multiples of 1/254
    of these steps. The error, of 1/64,516 of the largest value, is far below that of bfloat16 rows.
    """
    scaled = rows.astype(jnp.float32)
    step = jnp.max(jnp.abs(scaled), axis=-1, keepdims=True) / LARGEST  # [B, 1]
    scaled = scaled / jnp.where(step == 0, 1, step)
    high = jnp.round(scaled)
    low = jnp.round((scaled - high) * (2 * LARGEST))
    terms = jnp.concatenate([high, low]).astype(jnp.int8)  # [2 B, K]
    high, low = jnp.split(_product(terms, weight.values, jnp.int32).astype(jnp.float32), 2)
    return (high + low / (2 * LARGEST)) * (step * weight.scales[:, 0])
