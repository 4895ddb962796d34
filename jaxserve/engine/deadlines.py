"""Which requests have run out of time."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heappop, heappush

from jaxserve.types import Request


class Deadlines:
    """Times at which requests have to be in a slot, or done. One that has ended by then is for the caller
    to leave out: its id may even belong to a later request, which `arrival_s` tells apart."""

    def __init__(self, queue_timeout_s: float | None):
        self._queue_timeout_s = queue_timeout_s
        self._heap: list[tuple[float, str, float, bool]] = []

    def add(self, request: Request) -> None:
        for timeout_s, is_queue in ((self._queue_timeout_s, True), (request.timeout_s, False)):
            if timeout_s is not None:
                entry = (request.arrival_s + timeout_s, request.request_id, request.arrival_s, is_queue)
                heappush(self._heap, entry)

    def passed(self, now: float) -> Iterator[tuple[str, float, bool]]:
        """(request_id, arrival_s, whether only waiting is over) of each that passed since the last call."""
        while self._heap and self._heap[0][0] <= now:
            yield heappop(self._heap)[1:]

    def clear(self) -> None:
        """Nobody is left."""
        self._heap.clear()
