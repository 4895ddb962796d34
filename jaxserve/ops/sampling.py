"""From logits to one token id a row, each row with its own parameters, none of them a compile-time constant.

Order, as in vLLM and llama.cpp's defaults: temperature, then top-k, top-p and min-p on the tempered
distribution, then one draw from what is left, renormalised.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp

NUM_CANDIDATES = 256  # largest logits looked at first; most filters end inside them
BISECTIONS = 32  # rounds that find a threshold among float32 values exactly
DRAW_BLOCK = 512  # vocabulary entries summed per block of the two-level draw
PEAK_BLOCK = 64  # vocabulary entries per block of the two-level search for the largest


class SamplingState(NamedTuple):
    """Per row: `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off."""

    temperature: jax.Array  # [B] float32
    top_k: jax.Array  # [B] int32
    top_p: jax.Array  # [B] float32
    min_p: jax.Array  # [B] float32
    seed: jax.Array  # [B, 2] uint32, the halves of the request's 64-bit seed


def greedy(logits: jax.Array) -> jax.Array:
    """The ids [B] of the largest of `logits` [B, V]; of equals the first."""

    def by_blocks(logits: jax.Array) -> jax.Array:  # XLA:CPU takes a maximum much faster than an argmax
        blocks = _blocks(logits, DRAW_BLOCK, -jnp.inf)
        block = jnp.argmax(jnp.max(blocks, axis=-1), axis=-1)
        entries = jnp.take_along_axis(blocks, block[:, None, None], axis=1)[:, 0]  # [B, DRAW_BLOCK]
        return block * DRAW_BLOCK + jnp.argmax(entries, axis=-1)

    at_once = partial(jnp.argmax, axis=-1)
    return jax.lax.platform_dependent(logits, cpu=by_blocks, default=at_once).astype(jnp.int32)


def largest(values: jax.Array, count: int) -> jax.Array:
    """The `count` largest of `values` [B, V], descending; exact."""

    def by_blocks(values: jax.Array) -> jax.Array:  # they lie in the blocks of the largest peaks
        blocks = _blocks(values, PEAK_BLOCK, -jnp.inf)
        if blocks.shape[1] > count:
            _, chosen = jax.lax.top_k(jnp.max(blocks, axis=-1), count)
            blocks = jnp.take_along_axis(blocks, chosen[:, :, None], axis=1)  # [B, count, PEAK_BLOCK]
        return at_once(blocks.reshape(values.shape[0], -1))

    def at_once(values: jax.Array) -> jax.Array:
        return jax.lax.top_k(values, count)[0]

    return jax.lax.platform_dependent(values, cpu=by_blocks, default=at_once)


def _blocks(values: jax.Array, size: int, fill: float) -> jax.Array:
    """`values` [B, V] as [B, ceil(V / size), size], filled up at the end."""
    B, V = values.shape
    return jnp.pad(values, ((0, 0), (0, -V % size)), constant_values=fill).reshape(B, -1, size)


def sample(logits: jax.Array, state: SamplingState, positions: jax.Array) -> jax.Array:
    """Ids [B] from float32 `logits` [B, V]; `positions` [B] are the sampled tokens' positions.

    A row's draw depends on its logits, its parameters and fold_in(key(seed), position), so neither on
    its slot nor on its batch-mates. Rows of temperature 0 are greedy.
    """
    draws = state.temperature > 0
    drawn = _draw(logits, state, positions)
    return jax.lax.cond(
        jnp.all(draws), lambda: drawn, lambda: jnp.where(draws, drawn, greedy(logits))
    )


def _draw(logits: jax.Array, state: SamplingState, positions: jax.Array) -> jax.Array:
    temperature = jnp.where(state.temperature > 0, state.temperature, 1.0)
    peak = jnp.max(logits, axis=-1, keepdims=True)
    weights = jnp.exp((logits - peak) / temperature[:, None])  # [B, V] the largest is 1
    filtered = jnp.any((state.top_k > 0) | (state.top_p < 1.0) | (state.min_p > 0.0))
    weights = jax.lax.cond(filtered, lambda: _filter(weights, state), lambda: weights)
    uniform = jax.vmap(_uniform)(state.seed, positions)
    return _inverse_cdf(weights, uniform)


def _uniform(seed: jax.Array, position: jax.Array) -> jax.Array:
    """A float32 in [0, 1) that belongs to this seed [2] and position."""
    key = jax.random.wrap_key_data(seed, impl="threefry2x32")
    return jax.random.uniform(jax.random.fold_in(key, position))


def _filter(weights: jax.Array, state: SamplingState) -> jax.Array:
    """`weights` [B, V], with 0 for tokens outside of top-k, top-p or min-p; ties at a border stay in.

    Top-p is of the distribution that top-k leaves, as in vLLM; the largest weight, 1, always stays in.
    Both borders are read off the largest NUM_CANDIDATES weights. Where one row's border lies further down,
    bisections over the vocabulary find it, exact too and slower; the other rows keep theirs, so that
    what stays in of a row never depends, not by a rounding, on its batch-mates.
    """
    V = weights.shape[-1]
    count = min(NUM_CANDIDATES, V)
    top = largest(weights, count)  # [B, C] descending
    k = jnp.where(state.top_k > 0, jnp.minimum(state.top_k, V), V)  # [B]

    def near() -> jax.Array:
        border_k = jnp.take_along_axis(top, jnp.minimum(k, count)[:, None] - 1, axis=1)
        border_k = jnp.where((k > count)[:, None], 0.0, border_k)
        kept = jnp.where(top >= border_k, top, 0.0)
        total = jnp.where(k > count, jnp.sum(weights, axis=-1), jnp.sum(kept, axis=-1))
        goal = state.top_p * total
        before = jnp.cumsum(kept, axis=-1) - kept  # weight of the tokens ahead of each candidate
        inside = (before < goal[:, None]) & (kept > 0)
        border_p = jnp.min(jnp.where(inside, top, jnp.inf), axis=-1, keepdims=True)
        border_p = jnp.where((state.top_p < 1.0)[:, None], border_p, 0.0)
        return jnp.maximum(border_k, border_p)

    def far() -> jax.Array:
        # Tie handling of top-k: those of equal weight to the k-th stay in, as in `near`.
        border_k = _largest_border(weights, lambda t: jnp.sum(weights >= t, axis=-1) >= k)
        kept = jnp.where(weights >= border_k, weights, 0.0)
        goal = state.top_p * jnp.sum(kept, axis=-1)
        border_p = _largest_border(kept, lambda t: jnp.sum(jnp.where(kept >= t, kept, 0.0), axis=-1) >= goal)
        return jnp.maximum(border_k, jnp.where((state.top_p < 1.0)[:, None], border_p, 0.0))

    covered = jnp.sum(top, axis=-1)
    k_is_near = (k <= count) | (k >= V)
    # With top-k inside the candidates, so is top-p: it is of what top-k leaves. Ties past the candidates
    # at the border are kept by `>=` below, and only their share of top-p's goal is then estimated.
    p_is_near = (k <= count) | (state.top_p >= 1.0) | (covered >= state.top_p * jnp.sum(weights, axis=-1))
    is_near = k_is_near & p_is_near
    near_border = near()
    border = jax.lax.cond(
        jnp.all(is_near), lambda: near_border, lambda: jnp.where(is_near[:, None], near_border, far())
    )
    border = jnp.minimum(border, 1.0)  # a top_p that rounds to 0 keeps the likeliest token
    return jnp.where((weights >= border) & (weights >= state.min_p[:, None]), weights, 0.0)


def _largest_border(weights: jax.Array, holds) -> jax.Array:
    """The largest t [B, 1] for which `holds(t)` [B] is true, holding for all smaller t; exact in float32.

    Non-negative floats order as their bit patterns do, so the search halves the range of patterns.
    """
    B = weights.shape[0]
    low = jnp.zeros((B,), jnp.int32)  # holds
    high = jnp.full((B,), 0x3F800001, jnp.int32)  # just above 1.0, the largest weight: does not hold

    def body(_, bounds):
        low, high = bounds
        middle = low + (high - low) // 2
        ok = holds(jax.lax.bitcast_convert_type(middle, jnp.float32)[:, None])
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle)

    low, _ = jax.lax.fori_loop(0, BISECTIONS, body, (low, high))
    return jax.lax.bitcast_convert_type(low, jnp.float32)[:, None]


def _inverse_cdf(weights: jax.Array, uniform: jax.Array) -> jax.Array:
    """The index [B] at which the running sum of `weights` [B, V] passes `uniform` [B] times their sum.

    Two levels, blocks and then entries of one block: far cheaper than a sum over the whole vocabulary,
    and never an entry of weight 0. NaN weights give some index, for there is no right one.
    """
    V = weights.shape[-1]
    padded = _blocks(weights, DRAW_BLOCK, 0.0)
    sums = jnp.sum(padded, axis=-1)  # [B, V / DRAW_BLOCK]
    blocks = jnp.cumsum(sums, axis=-1)
    target = uniform * blocks[:, -1]
    block = _first_above(sums, blocks, target)
    previous = jnp.take_along_axis(blocks, jnp.maximum(block - 1, 0)[:, None], axis=1)[:, 0]
    before = jnp.where(block > 0, previous, 0.0)
    entries = jnp.take_along_axis(padded, block[:, None, None], axis=1)[:, 0]  # [B, DRAW_BLOCK]
    inner = _first_above(entries, jnp.cumsum(entries, axis=-1), target - before)
    return jnp.minimum(block * DRAW_BLOCK + inner, V - 1).astype(jnp.int32)


def _first_above(weights: jax.Array, sums: jax.Array, target: jax.Array) -> jax.Array:
    """The first index [B] with a weight whose running sum exceeds `target`, else the last with a weight.

    `weights` and their running `sums` are [B, n]. XLA sums in an order that may let a sum grow, by a
    rounding, where the weight is 0; so the weights themselves are looked at too.
    """
    positive = weights > 0
    above = positive & (sums > target[:, None])
    last = sums.shape[-1] - 1 - jnp.argmax(positive[:, ::-1], axis=-1)
    return jnp.where(jnp.any(above, axis=-1), jnp.argmax(above, axis=-1), last)
