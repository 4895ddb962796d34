"""Whether a sequence should begin now, given the pages that those who run will still need."""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.kv_pages import KVPages
from jaxserve.engine.sequence import Sequence

FIRST_GUESS = 128.0  # output tokens of a request, before any has ended
WEIGHT = 1 / 32  # of one more request in the mean


class Admission:
    """Two ways to answer.

    *reserve*: all pages that it may ever hold can be held back beside those of all others. Nobody is
    ever preempted; pages are held back for `max_tokens` even if the answer ends early.

    *optimistic*: the pages that it is expected to need are free, beyond those that the others are expected
    to take. The expected output is the mean of what requests generated lately, within their `max_tokens`;
    one that is past the mean is expected to go on for a page. What it would share with others
    costs nothing. When the guess was wrong, somebody is preempted.
    """

    def __init__(self, config: EngineConfig, kv: KVPages):
        self._page_size = config.page_size
        self._kv = kv
        self._reserves = config.admission == "reserve"
        self.mean_output = FIRST_GUESS

    def observe(self, num_outputs: int) -> None:
        """A request has ended by itself after so many tokens."""
        self.mean_output += WEIGHT * (num_outputs - self.mean_output)

    def admits(self, seq: Sequence, running: Iterable[Sequence]) -> bool:
        """Whether `seq` may begin beside `running`. Alone it always may: the pool holds the longest one."""
        if self._reserves:
            return self._kv.can_reserve(seq)
        others = list(running)
        if not others:
            return True
        room = self._kv.pool.num_free - self._expected_pages(seq)
        for other in others:
            room -= max(0, self._expected_pages(other) - (len(other.pages) - other.num_slid))
        return room >= 0 or room + self._kv.num_shareable(seq) >= 0

    def _expected_pages(self, seq: Sequence) -> int:
        page_size = self._page_size
        outputs = max(self.mean_output, max(seq.num_launched_outputs, len(seq.output_ids)) + page_size)
        return min(seq.most_pages, ceil((seq.num_prompt + outputs) / page_size))
