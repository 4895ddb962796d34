"""A turn's decisions as plain frozen data, and what the engine needs of a device.

The scheduler's `schedule()` makes a `Plan`; the runner launches it; `apply()` takes the sampled ids
back. A Plan holds no array and no model object: it can be logged, replayed and broadcast.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from jaxserve.types import SamplingParams, TokenLogprobs

MAX_END_IDS = 16  # that the device knows of a slot; an end at a further one comes to light on the host


@dataclass(frozen=True, slots=True)
class History:
    """What shaping a slot's logits starts from: the ids that are in its cache once it samples."""

    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]  # none, unless the sequence goes on after a preemption
    end_ids: tuple[int, ...]  # of tokens that must not come before `min_tokens`, at most MAX_MASKED_END_IDS


class Row(NamedTuple):  # one is made for every row of every step: a dataclass takes three times as long
    """One sequence's part of a step.

        cache positions   0 ........ start ........ start + query_len
                          in cache   written by this step

    A decode row feeds the token the device sampled last for this slot, so the host need not know it yet.
    Once that was one of the slot's `end_ids`, the device skips the slot's rows: nothing is written, and the
    ids that come back for them mean nothing.
    """

    slot: int
    start: int  # tokens of this sequence in the cache before this step
    query_len: int  # of a decode row: at most the step's iterations
    tokens: tuple[int, ...] | None  # the chunk's ids (prefill); None: the slot's last sampled id (decode)
    first_page: int  # index into the sequence's page list at which new_pages go
    new_pages: tuple[int, ...]  # pages gained since the slot's last row; a new slot's first row has all
    sample: bool  # the last query's logits yield a token (false for all but a prompt's last chunk)
    params: SamplingParams | None  # on the slot's first row; the device keeps them for the slot
    end_ids: tuple[int, ...] = ()  # the same; ids that end the sequence, at most MAX_END_IDS of them
    history: History | None = None  # the same; for `params` that are `is_shaped`, and only for those
    # Prompt ids to score, each after its query: the first one after query `first_target`.
    targets: tuple[int, ...] = ()
    first_target: int = 0
    num_pooled: int = 0  # of its queries, the last ones: their hidden states go into an embedding


@dataclass(frozen=True, slots=True)
class Step:
    """One compiled call: a rectangle [B, Q] of a listed shape, rows padded up to B."""

    kind: Literal["prefill", "decode"]
    batch: int  # B, a bucket
    queries: int  # Q, a bucket; 1 for decode
    rows: tuple[Row, ...]
    iterations: int = 1  # decode: a row is fed so often what was sampled for it just now; 1, or decode_steps


@dataclass(frozen=True, slots=True)
class Plan:
    """One turn: steps that run one after the other on the device, in this order."""

    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sampled ids of one step, `iterations` for each of its rows, row by row; meaningful where `row.sample`.

    Of a decode row the first `query_len` are, up to the first that ends the sequence.
    """

    token_ids: tuple[int, ...]
    # By row, where its sequence asked for log-probabilities; () when no row did.
    logprobs: tuple[TokenLogprobs | None, ...] = ()  # of the sampled id
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()  # of the row's targets
    # [rows, H]: of each row the sum over its `num_pooled` queries of the normed hidden states; None: no row
    # has any.
    pooled: np.ndarray | None = None


MaskSource = Callable[[Step], np.ndarray | None]


class Runner(Protocol):
    """A device, real or fake. Called from the engine thread only.

    `launch` returns without waiting for the device; steps run in the order of launching. `fetch` blocks
    until the ids of that launch are on the host. The engine launches turn n+1 before it fetches turn n.

    `masks` is for grammars. It is called once a step, between the launch of the step's forward pass and that
    of its sampler, and may `fetch` earlier launches. It returns int32 [B, ceil(V / 32)], where bit i % 32 of
    word i // 32 in row n tells whether row n of the step may yield id i; None when no row has a grammar.
    """

    def launch(self, plan: Plan, masks: MaskSource | None = None) -> Any: ...

    def fetch(self, handle: Any) -> tuple[StepResult, ...]: ...
