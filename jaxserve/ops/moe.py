"""Mixture of experts: which experts a token takes, and running those that anybody takes."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

MAX_BLOCK_ROWS = 64


def route(logits: jax.Array, num_active: int, *, normalise: bool) -> tuple[jax.Array, jax.Array]:
    """(experts, weights) [T, k] of router logits [T, E]: the k likeliest and their probabilities.

    With `normalise` these sum to 1. Source: Shazeer et al. 2017, arXiv:1701.06538, section 2.1.
    """
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits, axis=-1), num_active)
    if normalise:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return experts, weights


def route_in_groups(
    logits: jax.Array,
    num_active: int,
    *,
    choice_bias: jax.Array | None,  # [E] float32
    sigmoid: bool,
    num_groups: int,
    active_groups: int,
    normalise: bool,
    scale: float,
) -> tuple[jax.Array, jax.Array]:
    """(experts, weights) [T, k] of router logits [T, E], all experts from the best groups.

    A group is as good as its best expert; with `choice_bias`, which is added to the scores that experts are
    chosen by and not to their weights, as its best two. Sources: DeepSeek-AI 2024, arXiv:2405.04434, section
    2.1.2, and arXiv:2412.19437, section 2.1.2; the models' reference code.
    """
    T, E = logits.shape
    scores = jax.nn.sigmoid(logits) if sigmoid else jax.nn.softmax(logits, axis=-1)
    choice = scores if choice_bias is None else scores + choice_bias
    if active_groups < num_groups:
        grouped = choice.reshape(T, num_groups, -1)
        best = jax.lax.top_k(grouped, 1 if choice_bias is None else min(2, grouped.shape[-1]))[0].sum(axis=-1)
        _, groups = jax.lax.top_k(best, active_groups)
        is_taken = jnp.any(groups[..., None] == jnp.arange(num_groups), axis=1)  # [T, num_groups]
        choice = jnp.where(is_taken[..., None], grouped, -jnp.inf).reshape(T, E)
    _, experts = jax.lax.top_k(choice, num_active)
    weights = jnp.take_along_axis(scores, experts, axis=-1)
    if normalise:
        weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
    return experts, scale * weights


def mix_experts(
    x: jax.Array,  # [T, H]
    experts: jax.Array,  # [T, k] int32
    weights: jax.Array,  # [T, k] float32
    is_live: jax.Array,  # [T] bool; other rows take no expert, and give 0
    expert: Callable[[jax.Array, jax.Array], jax.Array],  # ([R, H], number) -> float32 [R, H]
    *,
    num_experts: int,
) -> jax.Array:  # float32 [T, H]
    """Of each row the weighted sum of what its experts make of it.

    Rows are sorted by expert and taken in blocks, each of one expert, so that the cost follows the experts
    in use. Each of these is read as often as its rows fill blocks. A row's sum is taken in the order of its
    experts' numbers, whatever else is in the batch.
    """
    T, k = experts.shape
    block = _block_rows(T * k, num_experts)
    taken = jnp.where(is_live[:, None], experts, num_experts).reshape(-1)  # [T k]
    order = jnp.argsort(taken, stable=True)
    counts = jnp.bincount(taken, length=num_experts)
    ends = jnp.cumsum(counts)  # in `order`, of each expert's rows
    block_ends = jnp.cumsum(-(-counts // block))
    # Of each block that there can be: its expert, and where its rows begin. They are looked up ahead, because
    # XLA's CPU compiler makes a call into nothing of a look-up in the body of the loop (jaxlib 0.12).
    blocks = jnp.arange(T * k // block + num_experts)
    numbers = jnp.minimum(jnp.searchsorted(block_ends, blocks, side="right"), num_experts - 1)
    first_blocks = block_ends[numbers] - -(-counts // block)[numbers]
    begins = (ends - counts)[numbers] + (blocks - first_blocks) * block
    numbers, begins, ends = jax.lax.optimization_barrier((numbers, begins, ends[numbers]))

    def one_block(i: jax.Array, out: jax.Array) -> jax.Array:
        rows = begins[i] + jnp.arange(block)
        is_own = rows < ends[i]
        places = order[jnp.where(is_own, rows, 0)]
        tokens = places // k
        scale = jnp.where(is_own, weights.reshape(-1)[places], 0)
        return out.at[tokens].add(scale[:, None] * expert(x[tokens], numbers[i]))

    return jax.lax.fori_loop(0, block_ends[-1], one_block, jnp.zeros(x.shape, jnp.float32))


def _block_rows(num_rows: int, num_experts: int) -> int:
    """Rows of a block: about an expert's share, a power of two."""
    share = max(1, min(MAX_BLOCK_ROWS, num_rows // num_experts))
    return 1 << (share - 1).bit_length()
