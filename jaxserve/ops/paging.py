"""Where a token's keys and values lie in the paged pool, and writing them there.

A layer's pool is flat: [num_pages * page_size, K, D]. Page 0 is the trash page: padding writes there
and nothing reads it.
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


def write_kv(pool: jax.Array, new: jax.Array, indices: jax.Array) -> jax.Array:
    """`pool` [pages * page_size, K, D] with `new` [B, Q, K, D] at `indices` [B, Q], in place if donated."""
    flat = new.reshape(-1, *new.shape[2:]).astype(pool.dtype)
    return pool.at[indices.reshape(-1)].set(flat, mode="promise_in_bounds")
