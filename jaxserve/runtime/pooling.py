"""Embeddings on their way from the device: one small program, launched only in steps where a row asks for it.

*gather* (runtime/logprobs.py) brings the hidden states that a step's rows want into one form [N, H], whatever
the step's rectangle; *pool* norms them and adds up those of each row. A prompt of several chunks has several
such sums, of some KiB each, which the host adds.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
from flax import nnx

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.plan import Step
from jaxserve.models.decoder import Decoder
from jaxserve.runtime.logprobs import num_scored


def most_rows(config: EngineConfig) -> int:
    """R: the most rows of a prefill step."""
    return max(batch for batch, _ in config.prefill_buckets)


def make_pooler(
    model: Decoder, config: EngineConfig
) -> Callable[[list[jax.Array], jax.Array, jax.Array], jax.Array]:
    """pooler(leaves, hidden [N, H], wanted [2, N]) -> [R, H], float32.

    `hidden` is by `gather`, and `wanted` by `pack_pooled`. Each row's sum of hidden states, taken behind the
    model's last norm: what its logits are made from.
    """
    graph, abstract = nnx.split(model)
    structure = jax.tree.structure(abstract)
    R = most_rows(config)

    def pooler(leaves: list[jax.Array], hidden: jax.Array, wanted: jax.Array) -> jax.Array:
        decoder = nnx.merge(graph, jax.tree.unflatten(structure, leaves))
        # Padding belongs to row R, which is not there: it is dropped, and no row sees another's numbers.
        return jax.ops.segment_sum(decoder.final_norm(hidden), wanted[1], R, indices_are_sorted=True)

    return pooler


def pack_pooled(step: Step, config: EngineConfig, vocab_size: int) -> np.ndarray | None:
    """[2, N]: where in the step's hidden states [B * Q, H] a query to be pooled is, and of which row it is.

    Rows of the step come one after the other; -1, of row R, ends them. None when no row pools.
    """
    total = sum(row.num_pooled for row in step.rows)
    if not total:
        return None
    wanted = np.full((2, num_scored(config, vocab_size)), -1, np.int32)
    wanted[1] = most_rows(config)
    at = 0
    for index, row in enumerate(step.rows):
        end, last = at + row.num_pooled, index * step.queries + row.query_len
        wanted[0, at:end] = np.arange(last - row.num_pooled, last)
        wanted[1, at:end] = index
        at = end
    return wanted
