"""Attention over the paged cache in plain XLA: runs everywhere; every kernel is tested against it."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxserve.ops.paging import head_scales, read_kv

BLOCK_TOKENS = 128  # keys handled per round of the loop: enough for a full dot, little waste at the end


def paged_attention_xla(
    q: jax.Array,  # [B, Q, N, D] this step's queries, right-padded to Q
    k_pool: jax.Array,  # [L, pages * page_size, K, D] or [L, pages * page_size, W]; int8: see ops/paging.py
    v_pool: jax.Array,  # the same
    layer: jax.Array,  # [] int32 which layer's pages to read
    window: jax.Array,  # [] int32 a query at position p sees keys in (p - window, p]
    page_table: jax.Array,  # [B, P] entries past the context are ignored
    context_lens: jax.Array,  # [B] tokens in cache, this step's included
    query_lens: jax.Array,  # [B] 0 marks an empty row
    *,
    page_size: int,
    scale: float,
    num_kv_heads: int | None = None,  # where the pool's shape doesn't say
    soft_cap: float | None = None,  # a score s becomes soft_cap * tanh(s / soft_cap)
    sinks: jax.Array | None = None,  # [N] float32, of each head one more score, whose value is 0
) -> jax.Array:  # [B, Q, N, D]
    """Causal attention over a paged cache, by blocks of keys with an online softmax in float32.

    Query i of a row is at position context_len - query_len + i. A layer without a window passes one that
    no context reaches. Padding queries return 0. The loop runs from the first block that any row can see
    to the longest live context, so cost follows the live context.
    Sources: Kwon et al. 2023, arXiv:2309.06180 (paging); Milakov & Gimelshein 2018, arXiv:1805.02867.
    """
    B, Q, N, D = q.shape
    K = k_pool.shape[2] if num_kv_heads is None else num_kv_heads
    G = N // K
    num_columns = page_table.shape[1]
    block_pages = max(1, min(BLOCK_TOKENS // page_size, num_columns))
    block = block_pages * page_size

    live = query_lens > 0
    starts = context_lens - query_lens  # [B] position of the first query
    positions = starts[:, None] + jnp.arange(Q)  # [B, Q]
    queries = q.reshape(B, Q, K, G, D).transpose(0, 2, 3, 1, 4).reshape(B, K, G * Q, D)

    last = jnp.max(jnp.where(live, context_lens, 0))
    first = jnp.min(jnp.where(live, jnp.maximum(starts - window + 1, 0), last))

    def body(i, carry):
        peak, total, out = carry  # [B, K, GQ], [B, K, GQ], [B, K, GQ, D]
        columns = i * block_pages + jnp.arange(block_pages)
        pages = page_table[:, jnp.minimum(columns, num_columns - 1)]  # [B, block_pages]
        index = (pages[:, :, None] * page_size + jnp.arange(page_size)).reshape(B, block)
        key_positions = i * block + jnp.arange(block)
        readable = key_positions < context_lens[:, None]  # [B, T]
        index = jnp.where(readable, index, 0)
        k = read_kv(k_pool, layer, index, num_kv_heads=K, head_dim=D)  # [B, T, K, D]
        v = read_kv(v_pool, layer, index, num_kv_heads=K, head_dim=D)
        # The trash page may hold anything, NaN included, and so may those that slid out of the window.
        wanted = readable & (key_positions > (starts - window)[:, None])
        v = jnp.where(wanted[:, :, None, None], v, 0)
        k_scales = v_scales = None
        if k_pool.dtype == jnp.int8:  # scaled are scores and weights: so many fewer than elements
            k_scales, v_scales = (head_scales(x).transpose(0, 2, 1)[:, :, None] for x in (k, v))
            k, v = k[..., :D].astype(q.dtype), v[..., :D].astype(q.dtype)  # whole numbers: exact
        scores = scale * jnp.einsum("bkqd,btkd->bkqt", queries, k, preferred_element_type=jnp.float32)
        if k_scales is not None:
            scores = scores * k_scales
        if soft_cap is not None:
            scores = soft_cap * jnp.tanh(scores / soft_cap)
        seen = key_positions <= positions[:, :, None]  # [B, Q, T]
        seen &= key_positions > positions[:, :, None] - window
        seen &= readable[:, None, :] & (jnp.arange(Q) < query_lens[:, None])[:, :, None]
        seen = jnp.broadcast_to(seen[:, None, None], (B, K, G, Q, block)).reshape(scores.shape)
        scores = jnp.where(seen, scores, -jnp.inf)
        new_peak = jnp.maximum(peak, jnp.max(scores, axis=-1))
        # A query that has seen no key yet keeps its peak at -inf; exp(-inf - 0) is a plain 0, not NaN.
        safe_peak = jnp.where(jnp.isneginf(new_peak), 0.0, new_peak)
        weights = jnp.exp(scores - safe_peak[..., None])
        shrink = jnp.exp(peak - safe_peak)
        total = total * shrink + jnp.sum(weights, axis=-1)
        if v_scales is not None:
            weights = weights * v_scales
        mixed = jnp.einsum(
            "bkqt,btkd->bkqd", weights.astype(v.dtype), v, preferred_element_type=jnp.float32
        )
        return new_peak, total, out * shrink[..., None] + mixed

    peak, total = jnp.full((B, K, G * Q), -jnp.inf, jnp.float32), jnp.zeros((B, K, G * Q), jnp.float32)
    if sinks is not None:  # as if it were the first key, with a value of 0
        peak = jnp.broadcast_to(sinks.reshape(K, G, 1), (B, K, G, Q)).reshape(B, K, G * Q)
        total = jnp.ones_like(total)
    carry = (
        peak,
        total,
        jnp.zeros((B, K, G * Q, D), jnp.float32),
    )
    _, total, out = jax.lax.fori_loop(first // block, -(-last // block), body, carry)
    out = out / jnp.where(total > 0, total, 1.0)[..., None]
    return out.reshape(B, K, G, Q, D).transpose(0, 3, 1, 2, 4).reshape(B, Q, N, D).astype(q.dtype)
