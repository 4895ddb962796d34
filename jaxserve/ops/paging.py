"""Where a token's keys and values lie in the paged pool, and writing them there.

A pool is [L, num_pages * page_size, K, D]: pages are flat, a token's index is page * page_size + offset.
Page 0 is the trash page: padding writes there and nothing reads it.

A TPU stores the last two axes in padded tiles of 8 x 128. There a pool is [L, num_pages * page_size, W]: a
token's heads side by side in one row of W values, K * D rounded up to whole lanes. A row of [3, 64] takes
twice that, so XLA stores such a pool with the tokens innermost, which is compact but can't be indexed by
token, and copies the whole pool into the other order and back in every step (docs/tpu.md).

A pool of int8 has a scale for each head of each token: D values and the 4 bytes of a float32 behind them.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

SCALE_BYTES = 4  # of a head's scale in a pool of int8
INT8_LIMIT = 127  # the largest of a head's int8 values


def write_indices(
    page_table: jax.Array, positions: jax.Array, valid: jax.Array, *, page_size: int
) -> jax.Array:
    """Flat pool index [B, Q] of each `positions` [B, Q]; trash (0) where not `valid` [B, Q].

    `page_table` [B, P] holds page ids; entries past a row's context are never looked at.
    """
    columns = jnp.clip(positions // page_size, 0, page_table.shape[1] - 1)
    pages = jnp.take_along_axis(page_table, columns, axis=1)  # [B, Q]
    return jnp.where(valid, pages * page_size + positions % page_size, 0)


def head_size(head_dim: int, dtype: DTypeLike) -> int:
    """Elements that a pool of `dtype` keeps of one token's head: D, in int8 D + 4; none of a head of none."""
    return head_dim + SCALE_BYTES if head_dim and jnp.dtype(dtype) == jnp.int8 else head_dim


def token_shape(num_kv_heads: int, head_dim: int, dtype: DTypeLike, lanes: int | None) -> tuple[int, ...]:
    """What a pool keeps of a token: (K, `head_size`), or with `lanes` a row of a multiple of so many."""
    size = head_size(head_dim, dtype)
    if lanes is None:
        return num_kv_heads, size
    return (-(-num_kv_heads * size // lanes) * lanes,)


def quantise_heads(new: jax.Array) -> jax.Array:
    """`new` [..., D] as int8 [..., D + 4]: whole numbers up to 127, and the bytes of the float32 that one is.

    An element is off by half of its head's largest over 127 at most. A head with a NaN is all NaN afterwards.
    """
    new = new.astype(jnp.float32)
    scale = jnp.max(jnp.abs(new), axis=-1) / INT8_LIMIT
    whole = jnp.round(jnp.where(scale[..., None] > 0, new / scale[..., None], 0))
    values = jnp.clip(jnp.nan_to_num(whole), -INT8_LIMIT, INT8_LIMIT).astype(jnp.int8)
    return jnp.concatenate([values, jax.lax.bitcast_convert_type(scale, jnp.int8)], axis=-1)


def head_scales(heads: jax.Array) -> jax.Array:
    """The scales [...] of `heads` int8 [..., D + 4]."""
    return jax.lax.bitcast_convert_type(heads[..., -SCALE_BYTES:], jnp.float32)


def read_kv(
    pool: jax.Array, layer: jax.Array, indices: jax.Array, *, num_kv_heads: int, head_dim: int
) -> jax.Array:
    """The keys or values [B, T, K, D] at `indices` [B, T] of `layer`, of an int8 pool [B, T, K, D + 4]."""
    found = pool[layer, indices]
    if found.ndim == 3:
        size = head_size(head_dim, pool.dtype)
        found = found[..., : num_kv_heads * size].reshape(*indices.shape, num_kv_heads, size)
    return found


def write_kv(pool: jax.Array, layer: jax.Array, new: jax.Array, indices: jax.Array) -> jax.Array:
    """`pool` [L, slots, K, D], D + 4 or W, with `new` [B, Q, K, D] at `indices` [B, Q] of `layer`.

    In place where the pool is donated to the step.
    """
    new = quantise_heads(new) if pool.dtype == jnp.int8 else new.astype(pool.dtype)
    flat = new.reshape(-1, *new.shape[2:])
    if pool.ndim == 3:
        flat = flat.reshape(flat.shape[0], -1)
        flat = jnp.pad(flat, ((0, 0), (0, pool.shape[2] - flat.shape[1])))
    return pool.at[layer, indices.reshape(-1)].set(flat, mode="promise_in_bounds")
