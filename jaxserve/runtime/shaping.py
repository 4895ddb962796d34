"""What shapes the logits of a slot, on the device: the state, what the host sends of it, and three programs.

    admit   replaces a slot's state, once, before the first step of a request that is shaped
    shape   logits -> shaped logits, between a step's forward pass and its sampler
    count   takes the sampled ids in, behind the sampler

They are programs of their own, beside the samplers. So a batch without a shaped row launches none of them,
and everything that reads logits works on shaped ones too. The ids never come to the host for this: step n+1
is launched before the ids of step n are read, as ever.

A preempted request is admitted again with the ids that it has by then, so what it has seen is right again.
A step that was launched before its request's end came to light counts ids in a slot whose next shaped owner
replaces all of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.plan import History
from jaxserve.ops.shaping import IN_PROMPT, MAX_COUNT, NO_ID, Shaping, shape_logits
from jaxserve.runtime.step import Rows
from jaxserve.types import (
    MAX_BAD_WORD_SEQUENCES,
    MAX_BAD_WORD_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_MASKED_END_IDS,
    SamplingParams,
)


def shaping_shapes(config: EngineConfig, vocab_size: int) -> Shaping:
    """The state by slot as ShapeDtypeStructs, trash slot included."""
    slots = config.max_num_seqs + 1
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((slots, *x.shape), x.dtype), slot_shapes(vocab_size)
    )


def slot_shapes(vocab_size: int) -> Shaping:
    """Of one slot, as `admit` takes it."""
    shapes: dict[str, tuple[tuple[int, ...], Any]] = {
        "seen": ((vocab_size,), jnp.uint16),
        "allowed": ((num_words(vocab_size),), jnp.uint32),
        "penalties": ((3,), jnp.float32),
        "bias_ids": ((MAX_LOGIT_BIAS,), jnp.int32),
        "bias": ((MAX_LOGIT_BIAS,), jnp.float32),
        "bad_words": ((MAX_BAD_WORD_SEQUENCES, MAX_BAD_WORD_TOKENS), jnp.int32),
        "recent": ((MAX_BAD_WORD_TOKENS - 1,), jnp.int32),
        "end_ids": ((MAX_MASKED_END_IDS,), jnp.int32),
        "end_position": ((), jnp.int32),
    }
    structs: dict[str, Any] = {name: jax.ShapeDtypeStruct(*value) for name, value in shapes.items()}
    return Shaping(**structs)


def shaping_bytes(vocab_size: int, max_num_seqs: int) -> int:
    """Bytes of the state on the device: 2.1 for each slot and id, and some 25 kB for each slot."""
    leaves = jax.tree.leaves(slot_shapes(vocab_size))
    return (max_num_seqs + 1) * sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)


def num_words(vocab_size: int) -> int:
    """int32 words of a mask, a bit for each id."""
    return -(-vocab_size // 32)


def slot_shaping(params: SamplingParams, history: History, vocab_size: int) -> Shaping:
    """A slot's state, in NumPy, for a request with so much of its output behind it."""
    seen = np.zeros(vocab_size, np.uint16)
    if params.has_penalties:
        counts = np.bincount(np.asarray(history.output_ids, np.int64), minlength=vocab_size)
        seen[:] = np.minimum(counts, MAX_COUNT)
        seen[np.asarray(history.prompt_ids, np.int64)] |= IN_PROMPT
    bad_words = np.full((MAX_BAD_WORD_SEQUENCES, MAX_BAD_WORD_TOKENS), NO_ID, np.int32)
    for row, word in zip(bad_words, params.bad_words):
        row[len(row) - len(word) :] = word
    bias_ids = np.full(MAX_LOGIT_BIAS, NO_ID, np.int32)
    bias = np.zeros(MAX_LOGIT_BIAS, np.float32)
    for i, (token_id, value) in enumerate(params.logit_bias):
        bias_ids[i], bias[i] = token_id, value
    recent = np.full(MAX_BAD_WORD_TOKENS - 1, NO_ID, np.int32)
    last = history.output_ids[-len(recent) :]
    recent[len(recent) - len(last) :] = last
    end_ids = np.full(MAX_MASKED_END_IDS, NO_ID, np.int32)
    end_ids[: len(history.end_ids)] = history.end_ids
    penalties = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
    values: dict[str, Any] = {
        "seen": seen,
        "allowed": allowed_words(params.allowed_token_ids, vocab_size),
        "penalties": np.array(penalties, np.float32),
        "bias_ids": bias_ids,
        "bias": bias,
        "bad_words": bad_words,
        "recent": recent,
        "end_ids": end_ids,
        "end_position": np.array(len(history.prompt_ids) + params.min_tokens, np.int32),
    }
    return Shaping(**values)


def allowed_words(ids: Iterable[int] | None, vocab_size: int) -> np.ndarray:
    """uint32 [num_words]: bit i % 32 of word i // 32 is set for the `ids`; for all of them if None."""
    bits = np.ones(32 * num_words(vocab_size), np.uint8)
    if ids is not None:
        bits[:] = 0
        bits[np.fromiter(ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def admit(state: Shaping, slot: jax.Array, new: Shaping) -> Shaping:
    """`state` with that of one slot replaced. Donate it: it is updated in place."""
    return Shaping(*(old.at[slot].set(row) for old, row in zip(state, new)))


def shape(
    state: Shaping, logits: jax.Array, rows: Rows, is_shaped: jax.Array, mask: jax.Array
) -> jax.Array:
    """Shaped logits [B, V]. `is_shaped` [B] bool: the row's slot has been admitted with what it wants.

    `mask` int32 [B, num_words], as llguidance writes it: which ids a step's grammars allow, all ones for a
    row without one.
    """
    of_rows = Shaping(*(x[rows.slots] for x in state))
    words = jax.lax.bitcast_convert_type(mask, jnp.uint32)
    return shape_logits(logits, of_rows, rows.positions, is_shaped, words)


def make_count(config: EngineConfig) -> Callable[[Shaping, Rows, jax.Array], Shaping]:
    """count(state, rows, ids [B]) -> state, with the ids of rows that yield a token counted. Donate it."""
    trash = config.max_num_seqs

    def count(state: Shaping, rows: Rows, ids: jax.Array) -> Shaping:
        # Rows that yield nothing share the trash slot: what is counted there is nobody's.
        target = jnp.where(rows.sampled, rows.slots, trash)
        before = state.seen[target, ids]
        more = before + jnp.where((before & MAX_COUNT) < MAX_COUNT, 1, 0).astype(before.dtype)
        recent = jnp.concatenate([state.recent[target, 1:], ids[:, None]], axis=1)
        return state._replace(
            seen=state.seen.at[target, ids].set(more, mode="promise_in_bounds"),
            recent=state.recent.at[target].set(recent, mode="promise_in_bounds"),
        )

    return count
