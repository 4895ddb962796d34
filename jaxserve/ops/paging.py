"""Where a token's keys and values lie in the paged pool, and writing them there.

A pool is [L, num_pages * page_size, K, D]: pages are flat, a token's index is page * page_size + offset.
Page 0 is the trash page: padding writes there and nothing reads it.

A TPU stores the last two axes in padded tiles of 8 x 128. There a pool is [L, num_pages * page_size, W]: a
token's heads side by side in one row of W values, K * D rounded up to whole lanes. A row of [3, 64] takes
twice that, so XLA stores such a pool with the tokens innermost, which is compact but can't be indexed by
token, and copies the whole pool into the other order and back in every step (docs/tpu.md).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp


def write_indices(
    page_table: jax.Array, positions: jax.Array, valid: jax.Array, *, page_size: int
) -> jax.Array:
    """Flat pool index [B, Q] of each `positions` [B, Q]; trash (0) where not `valid` [B, Q].

    `page_table` [B, P] holds page ids; entries past a row's context are never looked at.
    """
    columns = jnp.clip(positions // page_size, 0, page_table.shape[1] - 1)
    pages = jnp.take_along_axis(page_table, columns, axis=1)  # [B, Q]
    return jnp.where(valid, pages * page_size + positions % page_size, 0)


def token_shape(num_kv_heads: int, head_dim: int, lanes: int | None) -> tuple[int, ...]:
    """What a pool keeps of one token: (K, D), or with `lanes` a row padded to a multiple of so many."""
    if lanes is None:
        return num_kv_heads, head_dim
    return (-(-num_kv_heads * head_dim // lanes) * lanes,)


def read_kv(
    pool: jax.Array, layer: jax.Array, indices: jax.Array, *, num_kv_heads: int, head_dim: int
) -> jax.Array:
    """The keys or values [B, T, K, D] at `indices` [B, T] of `layer`; the inverse of `write_kv`."""
    found = pool[layer, indices]
    if found.ndim == 3:
        found = found[..., : num_kv_heads * head_dim].reshape(*indices.shape, num_kv_heads, head_dim)
    return found


def write_kv(pool: jax.Array, layer: jax.Array, new: jax.Array, indices: jax.Array) -> jax.Array:
    """`pool` [L, pages * page_size, K, D], or W, with `new` [B, Q, K, D] at `indices` [B, Q] of `layer`.

    In place where the pool is donated to the step.
    """
    flat = new.reshape(-1, *new.shape[2:]).astype(pool.dtype)
    if pool.ndim == 3:
        flat = flat.reshape(flat.shape[0], -1)
        flat = jnp.pad(flat, ((0, 0), (0, pool.shape[2] - flat.shape[1])))
    return pool.at[layer, indices.reshape(-1)].set(flat, mode="promise_in_bounds")
