"""One request on its way through the engine, as the scheduler sees it."""

from __future__ import annotations

import sys
from enum import Enum

import numpy as np

from jaxserve.engine.output import OutputProcessor
from jaxserve.engine.prefix import Chain
from jaxserve.types import Pooling, Request, TokenLogprobs

Rank = tuple[float, int]  # place in line, lower is sooner


class SequenceState(Enum):
    WAITING = "waiting"  # for a slot and pages
    PREFILL = "prefill"  # in a slot; a part of the prompt is still to be launched
    DECODE = "decode"  # in a slot; every further step feeds one token
    PREEMPTED = "preempted"  # waits again, without pages; ids of its last step may be outstanding
    ENDING = "ending"  # its last step is launched, its slot is free again, ids are outstanding
    FINISHED = "finished"  # whatever still comes back from the device for it is dropped


class Sequence:
    """Mutable; the scheduler is its one owner, all others read.

    The device is one launch ahead of what the host has read, so positions count what was launched and
    `output_ids` what came back:

        prompt_ids ............ output_ids ... ids not read yet
        0                       num_prompt     num_prompt + num_launched_outputs
        in cache: [0, num_cached) once the launched steps have run

    After `replay` the device goes through the same positions once more, and is behind `output_ids` until
    `num_read_outputs` has caught up.
    """

    __slots__ = (
        "admitted_s",
        "chain",
        "end_ids",
        "first_token_s",
        "has_diverged",
        "is_plain",
        "is_simple",
        "last_logprobs",
        "last_token_s",
        "max_outputs",
        "most_pages",
        "num_cached",
        "num_hit",
        "num_launched_outputs",
        "num_pooled",
        "num_prompt",
        "num_read_outputs",
        "num_scored",
        "num_slid",
        "num_to_prefill",
        "num_told_pages",
        "output",
        "output_ids",
        "pages",
        "pooled",
        "pooling",
        "prompt_logprobs",
        "rank",
        "register_at",
        "registers",
        "remaps",
        "request",
        "slide_at",
        "slot",
        "state",
        "tells_logprobs",
    )

    def __init__(
        self, request: Request, most_pages: int, rank: Rank, end_ids: tuple[int, ...] = (),
        pooling: Pooling | None = None,
    ):  # fmt: skip
        self.request = request
        self.end_ids = end_ids  # after one of them the device skips the rows of this sequence
        self.pooling = pooling  # how to make its prompt's embedding; None: nobody asks for one
        params = request.params
        # Only the sampler looks at its logits, so that several decode steps may share a launch.
        self.is_plain = params.logprobs is None and not params.is_shaped and request.grammar is None
        self.tells_logprobs = params.logprobs is not None or params.prompt_logprobs is not None
        # Its ids become text, and no more.
        self.is_simple = not self.tells_logprobs and params.max_tokens > 0 and request.grammar is None
        self.num_prompt = len(request.prompt_ids)
        self.max_outputs = max(1, params.max_tokens)  # the one of max_tokens 0 is dropped in the end
        self.rank = rank
        self.num_to_prefill = self.num_prompt  # tokens to have in cache before one is sampled
        self.most_pages = most_pages  # it can come to hold
        self.state = SequenceState.WAITING
        self.slot: int | None = None
        self.pages: list[int] = []  # in order of position
        self.num_slid = 0  # of these, the first ones: given back, since no later query sees them
        self.slide_at = sys.maxsize  # once so many tokens are cached, the next page has slid out of sight
        self.num_told_pages = 0  # of these the device has so many in its page table
        self.remaps: list[tuple[int, int]] = []  # (index, page) to replace a duplicate in `pages`; both held
        self.chain: Chain | None = None  # the part of `pages` that the prefix cache knows
        self.register_at = 0  # once so many tokens are known and cached, the next page can be registered
        self.registers = True  # False: its pages are not shared, so that it never holds two for one
        self.num_cached = 0
        self.num_hit = 0  # prompt tokens that the prefix cache gave
        self.num_launched_outputs = 0
        self.num_read_outputs = 0  # ids that came back since the sequence, or its replay, began
        self.output: OutputProcessor  # what makes text of its ids: set by the engine, which is its one user
        self.output_ids: list[int] = []
        self.num_scored = 0  # positions whose next prompt id is scored by launched steps
        self.prompt_logprobs: list[TokenLogprobs] = []  # of these, as far as they came back
        self.num_pooled = 0  # positions whose part of the embedding is made by launched steps
        self.pooled: np.ndarray | None = None  # [H] float64, the sum of these parts, as far as they came back
        self.last_logprobs: TokenLogprobs | None = None  # of the last of output_ids
        self.has_diverged = False  # a replay gave another id than the one in output_ids; it ends at once
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Ids at the positions [start, end), all of them known."""
        if end <= self.num_prompt:
            return self.request.prompt_ids[start:end]
        prompt = self.request.prompt_ids[start:]
        return prompt + tuple(self.output_ids[max(0, start - self.num_prompt) : end - self.num_prompt])

    def targets(self, start: int, end: int) -> tuple[int, tuple[int, ...]]:
        """(first_target, targets) of a row that computes the positions [start, end)."""
        if self.request.params.prompt_logprobs is None or self.num_scored >= min(end, self.num_prompt - 1):
            return 0, ()
        first = max(start, self.num_scored)
        return first - start, self.request.prompt_ids[first + 1 : end + 1]

    @property
    def hit_limit(self) -> int:
        """Up to this position KV from the cache will do. Where the prompt is yet to be scored, or to go into
        a mean, it won't: these are made from hidden states, which nobody keeps."""
        limit = self.num_to_prefill - 1  # the last token is computed, for its logits
        if self.request.params.prompt_logprobs is not None and self.num_scored < self.num_prompt - 1:
            limit = min(limit, self.num_scored)
        if self.pooling == "mean":
            limit = min(limit, self.num_pooled)
        return limit

    def num_to_pool(self, start: int, end: int) -> int:
        """How many of the positions [start, end) that a row computes go into the embedding: the last ones."""
        if self.pooling == "mean":
            return max(0, end - max(start, self.num_pooled))
        return int(self.pooling == "last" and end == self.num_prompt)

    def add_pooled(self, part: np.ndarray) -> None:
        """Take in what a row gave of the embedding [H]."""
        self.pooled = part.astype(np.float64) if self.pooled is None else self.pooled + part

    def replay(self) -> None:
        """Begin again from the prompt. The ids that come back are known until they are as many as before."""
        self.num_launched_outputs = self.num_read_outputs = 0

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id!r}, {self.state.value}, slot={self.slot}, "
            f"cached={self.num_cached}/{self.num_prompt}, outputs={self.num_launched_outputs})"
        )


def rank_of(seq: Sequence) -> Rank:
    return seq.rank
