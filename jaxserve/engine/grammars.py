"""The grammars of those who run: where each answer stands, and which ids may come next."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from jaxserve.engine.sequence import Sequence as Running
from jaxserve.errors import GrammarError
from jaxserve.types import Grammar, GrammarState

ANY = -1  # a word of a mask in which every id is allowed
MAX_THREADS = 4


@dataclass(slots=True)
class _Answer:
    """The state after `num_taken` ids of the answer."""

    grammar: Grammar
    state: GrammarState
    num_taken: int = 0


class Grammars:
    """Owned by the engine thread, which waits while others work for it.

    An answer's state is brought to where it is needed when a mask is. So it outlives a preemption, after
    which the answer goes on from the ids it has, and starts over when they are sampled once more.
    """

    def __init__(self, vocab_size: int):
        self._num_words = -(-vocab_size // 32)
        self._answers: dict[str, _Answer] = {}
        self._failures: dict[str, str] = {}
        self._pool: ThreadPoolExecutor | None = None

    @property
    def num_live(self) -> int:
        return len(self._answers)

    def add(self, request_id: str, grammar: Grammar) -> None:
        self._answers[request_id] = _Answer(grammar, grammar.start())

    def drop(self, request_id: str) -> None:
        """Forget an answer that has ended; one without a grammar is ignored."""
        self._answers.pop(request_id, None)
        self._failures.pop(request_id, None)

    def clear(self) -> None:
        self._answers.clear()
        self._failures.clear()

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
        allow everything. So does one whose grammar has failed, which `is_complete` tells.
        """
        masks = np.full((batch, self._num_words), ANY, np.int32)

        def fill(item: tuple[int, Running]) -> None:
            row, seq = item
            request_id = seq.request.request_id
            try:
                self._catch_up(seq, seq.num_launched_outputs, fetched.get(seq, ()))
                self._answers[request_id].state.fill(masks[row])
            except GrammarError as error:
                masks[row] = ANY
                self._failures[request_id] = str(error)

        if len(rows) > 1:
            if self._pool is None:
                most = min(MAX_THREADS, os.cpu_count() or 1)
                self._pool = ThreadPoolExecutor(most, thread_name_prefix="jaxserve-masks")
            list(self._pool.map(fill, rows.items()))  # the costly part leaves other threads running
        else:
            for item in rows.items():
                fill(item)
        return masks

    def is_complete(self, seq: Running) -> bool:
        """Whether the ids in `output_ids` have brought the answer to the end of its grammar.

        Raises GrammarError once it can't go on by its grammar.
        """
        request_id = seq.request.request_id
        if (failure := self._failures.get(request_id)) is not None:
            raise GrammarError(failure)
        self._catch_up(seq, len(seq.output_ids), ())
        return self._answers[request_id].state.is_complete

    def _catch_up(self, seq: Running, position: int, fetched: Sequence[int]) -> None:
        """Bring the state to where `position` ids of the answer are taken."""
        answer = self._answers[seq.request.request_id]
        if answer.num_taken > position:
            answer.state, answer.num_taken = answer.grammar.start(), 0
        num_known = len(seq.output_ids)
        while answer.num_taken < position:
            i = answer.num_taken
            answer.state.advance(seq.output_ids[i] if i < num_known else fetched[i - num_known])
            answer.num_taken += 1
