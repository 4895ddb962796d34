"""Where a token's keys and values lie in the paged pool, and writing them there.

A pool is [L, num_pages * page_size, K, D]: pages are flat, a token's index is page * page_size + offset.
Page 0 is the trash page: padding writes there and nothing reads it.
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


def write_kv(pool: jax.Array, layer: jax.Array, new: jax.Array, indices: jax.Array) -> jax.Array:
    """`pool` [L, pages * page_size, K, D] with `new` [B, Q, K, D] at `indices` [B, Q] of `layer`.

    In place where the pool is donated to the step.
    """
    flat = new.reshape(-1, *new.shape[2:]).astype(pool.dtype)
    return pool.at[layer, indices.reshape(-1)].set(flat, mode="promise_in_bounds")
