"""Changes to the logits before a token is picked: biases, penalties, and what must not be picked.

The order is that of vLLM: `logit_bias`, then `repetition_penalty`, `frequency_penalty` and
`presence_penalty`, then what is forbidden (bad words, ends before `min_tokens`), then what is not allowed
(`allowed_token_ids`, a grammar's mask). Temperature and the filters of ops/sampling.py come after. A row of
temperature 0 takes the likeliest of the shaped logits.

What is not allowed gets -inf. What is forbidden gets FORBIDDEN, far below every logit but above -inf: where
all that is allowed is forbidden too, one of the forbidden is picked. So a grammar is never broken, and a
list of allowed ids never left, for the sake of a bad word or of `min_tokens`.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

FORBIDDEN = -1e30
IN_PROMPT = 1 << 15  # bit of a `seen` entry; the bits below it count the token in the output
MAX_COUNT = IN_PROMPT - 1  # a token seen more often counts as seen so often
NO_ID = -1  # fills up lists of ids


class Shaping(NamedTuple):
    """Per row. Lists of ids are filled up with NO_ID, and an id stands once in `bias_ids`."""

    seen: jax.Array  # [B, V] uint16, IN_PROMPT and the number of times in the output
    allowed: jax.Array  # [B, ceil(V / 32)] uint32, bit i % 32 of word i // 32 allows id i
    penalties: jax.Array  # [B, 3] float32: repetition (off: 1), frequency, presence (off: 0)
    bias_ids: jax.Array  # [B, n] int32
    bias: jax.Array  # [B, n] float32
    bad_words: jax.Array  # [B, n, L] int32, right-aligned: the last id is forbidden after the ones before it
    recent: jax.Array  # [B, L - 1] int32, the last ids of the output, right-aligned
    end_ids: jax.Array  # [B, n] int32, forbidden before `end_position`
    end_position: jax.Array  # [B] int32, the first at which the output may end


def shape_logits(
    logits: jax.Array, shaping: Shaping, positions: jax.Array, is_shaped: jax.Array, mask: jax.Array
) -> jax.Array:
    """`logits` [B, V] float32 as they are sampled from; `positions` [B] are those of the tokens to pick.

    `mask` [B, ceil(V / 32)] uint32, bits as in `Shaping.allowed`, applies to all rows, and `shaping` to
    those of which `is_shaped` [B] is true. A row that is not shaped, all of whose mask is set, comes out bit
    for bit as it went in. One pass over the vocabulary; the lists are scattered into its result.
    """
    B, V = logits.shape
    of_row = is_shaped[:, None]
    penalties = jnp.where(of_row, shaping.penalties, jnp.array([1.0, 0.0, 0.0]))
    allowed = jnp.where(of_row, shaping.allowed, jnp.uint32(0xFFFFFFFF)) & mask
    bits = (allowed[:, :, None] >> jnp.arange(32, dtype=jnp.uint32)) & 1  # [B, words, 32]
    shaped = _penalise(logits, shaping.seen, penalties)
    shaped = jnp.where(bits.reshape(B, -1)[:, :V] > 0, shaped, -jnp.inf)

    bias_ids = jnp.where(of_row, shaping.bias_ids, NO_ID)
    biased = jnp.take_along_axis(logits, jnp.maximum(bias_ids, 0), axis=1) + shaping.bias
    seen = jnp.take_along_axis(shaping.seen, jnp.maximum(bias_ids, 0), axis=1)
    shaped = _put(shaped, bias_ids, _penalise(biased, seen, penalties), allowed)

    follows = shaping.bad_words[:, :, :-1]  # [B, n, L - 1]
    matches = jnp.all((follows == NO_ID) | (follows == shaping.recent[:, None]), axis=-1)
    bad_ids = jnp.where(matches, shaping.bad_words[:, :, -1], NO_ID)
    end_ids = jnp.where((positions < shaping.end_position)[:, None], shaping.end_ids, NO_ID)
    forbidden = jnp.where(of_row, jnp.concatenate([bad_ids, end_ids], axis=1), NO_ID)
    return _put(shaped, forbidden, jnp.full(forbidden.shape, FORBIDDEN), allowed)


def _penalise(logits: jax.Array, seen: jax.Array, penalties: jax.Array) -> jax.Array:
    """`logits` [B, n] of ids whose `seen` are given.

    Repetition is that of Keskar et al. 2019, arXiv:1909.05858, made to lower negative logits too, for ids of
    prompt and output. Frequency and presence are OpenAI's, of the output alone.
    """
    repetition, frequency, presence = (penalties[:, i : i + 1] for i in range(3))
    count = (seen & MAX_COUNT).astype(jnp.float32)
    repeated = jnp.where(logits > 0, logits / repetition, logits * repetition)
    logits = jnp.where(seen > 0, repeated, logits)
    return logits - frequency * count - jnp.where(count > 0, presence, 0.0)


def _put(logits: jax.Array, ids: jax.Array, values: jax.Array, allowed: jax.Array) -> jax.Array:
    """`logits` with `values` [B, n] at `ids` [B, n], but for NO_ID; -inf where `allowed` has no bit."""
    B, V = logits.shape
    words = jnp.take_along_axis(allowed, jnp.maximum(ids, 0) // 32, axis=1)
    is_allowed = (words >> (jnp.maximum(ids, 0) % 32).astype(jnp.uint32)) & 1
    values = jnp.where(is_allowed > 0, values, -jnp.inf)
    rows = jnp.arange(B)[:, None]
    return logits.at[rows, jnp.where(ids == NO_ID, V, ids)].set(values, mode="drop")
