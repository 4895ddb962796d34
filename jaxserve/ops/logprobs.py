"""From logits to what a client sees of them: a token's log-probability, its rank, and the likeliest tokens.

Figures are of the model's own distribution: natural logarithms, temperature 1, before any penalty, bias or
filter. What is as wide as the vocabulary is reduced here and never leaves the device.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

BLOCK_BYTES = 1 << 25  # of float32 logits that `score_rows` holds at once; some 2 or 3 times that in all
LEAST_BLOCK, LARGEST_BLOCK = 8, 256  # rows; fewer waste the head's weights, more gain nothing


class Scores(NamedTuple):
    """Of R rows. A target's log-probability has the same bits wherever it stands among the likeliest."""

    logprob: jax.Array  # [R] float32, of the target
    rank: jax.Array  # [R] int32, 1 is the likeliest; of equals all have the best one's
    top_ids: jax.Array  # [R, K] int32, the likeliest first
    top_logprobs: jax.Array  # [R, K] float32


def score(logits: jax.Array, targets: jax.Array, *, num_top: int) -> Scores:
    """Scores of the ids `targets` [R] under float32 `logits` [R, V], with the `num_top` likeliest, K."""
    total = jax.scipy.special.logsumexp(logits, axis=-1, keepdims=True)  # [R, 1]
    chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)  # [R, 1]
    top, top_ids = jax.lax.top_k(logits, num_top)
    rank = 1 + jnp.sum(logits > chosen, axis=-1, dtype=jnp.int32)
    return Scores((chosen - total)[:, 0], rank, top_ids.astype(jnp.int32), top - total)


def block_rows(num_rows: int, vocab_size: int) -> int:
    """Rows of logits that `score_rows` makes at once: a power of two, or all rows if they are fewer."""
    rows = max(LEAST_BLOCK, min(LARGEST_BLOCK, BLOCK_BYTES // (4 * vocab_size)))
    return min(num_rows, 1 << (rows.bit_length() - 1))


def score_rows(
    hidden: jax.Array,  # [N, H]
    targets: jax.Array,  # [N]
    num_wanted: jax.Array,  # [] of the N, the first ones
    head: Callable[[jax.Array], jax.Array],  # [R, H] -> float32 logits [R, V]
    *,
    vocab_size: int,
    num_top: int,
) -> Scores:
    """Scores of `targets` after `hidden`, N of them; what is past the wanted ones means nothing.

    Works on blocks of R = `block_rows(N, vocab_size)` rows, so of logits there are never more than [R, V],
    and stops behind the last wanted row: cost follows their number. R divides N.
    """
    N, R = len(targets), block_rows(len(targets), vocab_size)
    assert N % R == 0, f"{N} rows are no multiple of a block of {R}"
    empty = Scores(
        jnp.zeros((N,), jnp.float32), jnp.zeros((N,), jnp.int32),
        jnp.zeros((N, num_top), jnp.int32), jnp.zeros((N, num_top), jnp.float32),
    )  # fmt: skip

    def one_block(i: jax.Array, scores: Scores) -> Scores:
        part = lambda array: jax.lax.dynamic_slice_in_dim(array, i * R, R)
        found = score(head(part(hidden)), part(targets), num_top=num_top)
        return jax.tree.map(
            lambda all, new: jax.lax.dynamic_update_slice_in_dim(all, new, i * R, axis=0), scores, found
        )

    return jax.lax.fori_loop(0, (num_wanted + R - 1) // R, one_block, empty)
