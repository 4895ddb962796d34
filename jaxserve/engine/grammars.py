"""The grammars of those who run: where each answer stands, and which ids may come next."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from jaxserve.engine.sequence import Sequence as Running
from jaxserve.errors import GrammarError, GrammarLimitError
from jaxserve.types import Grammar, GrammarState

ANY = -1  # a word of a mask in which every id is allowed
MAX_THREADS = 4
# What an answer's grammar may take, in processor time: so much for each token, and so much more in all.
# Limits on a single step are the grammar's own.
TOKEN_CPU_S = 0.02
EXCESS_CPU_S = 1.0


@dataclass(slots=True)
class _Answer:
    """The state after `num_taken` ids of the answer."""

    grammar: Grammar
    state: GrammarState
    num_taken: int = 0
    excess_s: float = 0.0  # that tokens took beyond TOKEN_CPU_S each
    failure: tuple[int, GrammarError] | None = None  # and how many ids it is good for

    def charge(self, cpu_s: float, num_tokens: int) -> None:
        """Raises GrammarLimitError once the answer has taken too much."""
        self.excess_s += max(0.0, cpu_s - num_tokens * TOKEN_CPU_S)
        if self.excess_s > EXCESS_CPU_S:
            raise GrammarLimitError(
                f"its tokens took {EXCESS_CPU_S:g} s of processor time beyond {TOKEN_CPU_S * 1000:g} ms each"
            )


class Grammars:
    """Owned by the engine thread, which waits while others work for it.

    An answer's state is brought to where it is needed when a mask is. So it outlives a preemption, after
    which the answer goes on from the ids it has, and starts over when they are sampled once more.
    """

    def __init__(self, vocab_size: int):
        self._num_words = -(-vocab_size // 32)
        self._answers: dict[str, _Answer] = {}
        self._pool: ThreadPoolExecutor | None = None

    @property
    def num_live(self) -> int:
        return len(self._answers)

    def add(self, request_id: str, grammar: Grammar) -> None:
        self._answers[request_id] = _Answer(grammar, grammar.start())

    def drop(self, request_id: str) -> None:
        """Forget an answer that has ended; one without a grammar is ignored."""
        self._answers.pop(request_id, None)

    def clear(self) -> None:
        self._answers.clear()

    def close(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False)
            self._pool = None

    def masks(
        self, batch: int, rows: Mapping[int, Running], fetched: Mapping[Running, Sequence[int]]
    ) -> np.ndarray:
        """int32 [batch, ceil(V / 32)]: bit i % 32 of word i // 32 tells whether the row may yield id i.

        `rows` are the sequences with a grammar by their row in the step, for the id that they sample next;
        `fetched` are ids that have come back and are not among `output_ids` yet. Rows without a grammar
        allow everything. So does one whose grammar has failed, which `check` tells once the id is there.
        """
        masks = np.full((batch, self._num_words), ANY, np.int32)

        def fill(item: tuple[int, Running]) -> None:
            row, seq = item
            answer = self._answers[seq.request.request_id]
            if answer.failure is not None:
                return
            try:
                began_s = time.thread_time()
                num_new = self._catch_up(answer, seq, seq.num_launched_outputs, fetched.get(seq, ()))
                answer.state.fill(masks[row])
                answer.charge(time.thread_time() - began_s, max(1, num_new))
            except GrammarError as error:
                masks[row] = ANY
                answer.failure = seq.num_launched_outputs, error

        if len(rows) > 1:
            if self._pool is None:
                most = min(MAX_THREADS, os.cpu_count() or 1)
                self._pool = ThreadPoolExecutor(most, thread_name_prefix="jaxserve-masks")
            list(self._pool.map(fill, rows.items()))  # the costly part leaves other threads running
        else:
            for item in rows.items():
                fill(item)
        return masks

    def check(self, seq: Running) -> None:
        """Raises GrammarError if the ids in `output_ids` go beyond those that the grammar was asked for."""
        failure = self._answers[seq.request.request_id].failure
        if failure is not None and len(seq.output_ids) > failure[0]:
            raise failure[1]

    def is_complete(self, seq: Running) -> bool:
        """Whether the ids in `output_ids` have brought the answer to the end of its grammar.

        Raises GrammarError if it can't go on by its grammar.
        """
        answer = self._answers[seq.request.request_id]
        if answer.failure is not None:
            return False  # the last of the ids that are good; the next one ends it
        began_s = time.thread_time()
        num_new = self._catch_up(answer, seq, len(seq.output_ids), ())
        if num_new:
            answer.charge(time.thread_time() - began_s, num_new)
        return answer.state.is_complete

    def _catch_up(self, answer: _Answer, seq: Running, position: int, fetched: Sequence[int]) -> int:
        """Bring the state to where `position` ids of the answer are taken. Returns how many that takes."""
        if answer.num_taken > position:
            answer.state, answer.num_taken = answer.grammar.start(), 0
        num_known, num_before = len(seq.output_ids), answer.num_taken
        while answer.num_taken < position:
            i = answer.num_taken
            answer.state.advance(seq.output_ids[i] if i < num_known else fetched[i - num_known])
            answer.num_taken += 1
        return position - num_before
