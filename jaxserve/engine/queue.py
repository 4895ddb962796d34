"""Who waits, and in which order."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator

from jaxserve.engine.sequence import Rank, Sequence, rank_of
from jaxserve.types import Request

AGEING_S = 10.0  # of waiting make up for one level of priority


def rank(request: Request, number: int, policy: str) -> Rank:
    """Place in line, lower is sooner; `number` counts submissions.

    With "priority" a request stands where one of priority 0 would that came `AGEING_S` seconds later for
    each level. So the order of two requests never changes, and whoever waits long enough is in front of
    everybody who comes: nothing starves.
    """
    if policy == "priority":
        return request.arrival_s + request.priority * AGEING_S, number
    return 0.0, number


class WaitingQueue:
    """Sequences by rank. One that was preempted stands where it stood before: in front of later ones."""

    def __init__(self) -> None:
        self._seqs: list[Sequence] = []
        self.num_tokens = 0  # to prefill

    def __len__(self) -> int:
        return len(self._seqs)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._seqs)

    @property
    def head(self) -> Sequence:
        return self._seqs[0]

    def add(self, seq: Sequence) -> None:
        insort(self._seqs, seq, key=rank_of)
        self.num_tokens += seq.num_prompt

    def remove(self, seq: Sequence) -> None:
        index = bisect_left(self._seqs, seq.rank, key=rank_of)
        assert self._seqs[index] is seq, f"{seq} does not wait"
        del self._seqs[index]
        self.num_tokens -= seq.num_prompt
