"""Log-probabilities on their way from the device: three small programs, and what the host makes of it.

They are launched only in steps where a row asks for them, behind the forward pass, so a batch that asks for
none pays nothing. *logprobs* scores the tokens that a step sampled, on the logits of its forward pass.
*score* scores prompt tokens, on hidden states of a prefill step, without ever holding the logits of all of
them. It is one program for all steps, as it takes a second to compile; *gather*, one for each size of a
prefill step, brings the hidden states into its form. The first two give one packed int32 array [N, 2 + 2K]:

    | log-probability | rank | K likeliest ids | their K log-probabilities |     floats by their bits
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.plan import Step
from jaxserve.models.decoder import Decoder
from jaxserve.ops.backend import Backend
from jaxserve.ops.logprobs import Scores, block_rows, score, score_rows
from jaxserve.types import TokenLogprobs


def num_top(config: EngineConfig, vocab_size: int) -> int:
    """K: how many of the likeliest tokens the device gives."""
    return min(config.max_logprobs, vocab_size)


def make_logprobs(config: EngineConfig) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """logprobs(logits [B, V], ids [B]) -> packed [B, 2 + 2K], of the ids that were sampled."""

    def logprobs(logits: jax.Array, ids: jax.Array) -> jax.Array:
        return _packed(score(logits, ids, num_top=num_top(config, logits.shape[-1])))

    return logprobs


def make_scorer(
    model: Decoder, config: EngineConfig, backend: Backend
) -> Callable[[list[jax.Array], jax.Array, jax.Array], jax.Array]:
    """scorer(leaves, hidden [N, H], wanted [2, N]) -> packed [N, 2 + 2K].

    `hidden` is by `gather`, and `wanted` by `pack_targets`.

    Takes memory for `block_rows` rows of logits, for each of them 4 V bytes some three times over.
    """
    graph, abstract = nnx.split(model)
    structure = jax.tree.structure(abstract)

    def scorer(leaves: list[jax.Array], hidden: jax.Array, wanted: jax.Array) -> jax.Array:
        decoder = nnx.merge(graph, jax.tree.unflatten(structure, leaves))
        vocab_size = decoder.config.vocab_size
        return _packed(
            score_rows(
                hidden, wanted[1], jnp.sum(wanted[0] >= 0), lambda x: decoder.logits(x, backend),
                vocab_size=vocab_size, num_top=num_top(config, vocab_size),
            )
        )  # fmt: skip

    return scorer


def gather(hidden: jax.Array, wanted: jax.Array) -> jax.Array:
    """The rows [N, H] of a step's `hidden` [B * Q, H] that `wanted` names."""
    return hidden[jnp.maximum(wanted[0], 0)]


def num_scored(config: EngineConfig, vocab_size: int) -> int:
    """N: the most tokens of a prefill step, rounded up to whole blocks."""
    num_tokens = max(batch * queries for batch, queries in config.prefill_buckets)
    block = block_rows(num_tokens, vocab_size)
    return -(-num_tokens // block) * block


def pack_targets(step: Step, config: EngineConfig, vocab_size: int) -> np.ndarray | None:
    """[2, N]: where in the step's hidden states [B * Q, H] a prompt token is scored, and which.

    Rows of the step come one after the other, each with its targets in order; -1 ends them. None when no
    row has targets.
    """
    total = sum(len(row.targets) for row in step.rows)
    if not total:
        return None
    wanted = np.full((2, num_scored(config, vocab_size)), -1, np.int32)
    wanted[1] = 0
    at = 0
    for index, row in enumerate(step.rows):
        end = at + len(row.targets)
        first = index * step.queries + row.first_target
        wanted[0, at:end] = np.arange(first, first + len(row.targets))
        wanted[1, at:end] = row.targets
        at = end
    return wanted


def of_sampled(
    packed: np.ndarray, ids: Sequence[int], counts: Sequence[int | None]
) -> tuple[TokenLogprobs | None, ...]:
    """What *logprobs* gave, by row of the step: as many of the likeliest as `counts` says, or None."""
    return tuple(
        None if count is None else unpack(packed[i : i + 1], ids[i : i + 1], count)[0]
        for i, count in enumerate(counts)
    )


def of_targets(
    packed: np.ndarray, step: Step, counts: Sequence[int | None]
) -> tuple[tuple[TokenLogprobs, ...], ...]:
    """What *score* gave, by row of the step."""
    found, at = [], 0
    for row, count in zip(step.rows, counts):
        end = at + len(row.targets)
        found.append(unpack(packed[at:end], row.targets, count or 0))
        at = end
    return tuple(found)


def unpack(rows: np.ndarray, ids: Sequence[int], count: int) -> tuple[TokenLogprobs, ...]:
    """Rows of a program's output, which are of `ids`, each with the `count` likeliest."""
    K = (rows.shape[1] - 2) // 2
    floats = rows.view(np.float32)
    columns = (
        floats[:, 0].tolist(), rows[:, 1].tolist(),
        rows[:, 2 : 2 + count].tolist(), floats[:, 2 + K : 2 + K + count].tolist(),
    )  # fmt: skip
    return tuple(
        TokenLogprobs(token_id, logprob, rank, tuple(top_ids), tuple(top_logprobs))
        for token_id, logprob, rank, top_ids, top_logprobs in zip(ids, *columns)
    )


def _packed(scores: Scores) -> jax.Array:
    bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.int32)
    return jnp.concatenate(
        [bits(scores.logprob)[:, None], scores.rank[:, None], scores.top_ids, bits(scores.top_logprobs)],
        axis=1,
    )
