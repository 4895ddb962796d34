"""How long the steps of an engine take, on the host and on the device."""

from __future__ import annotations

from bisect import bisect_left

from jaxserve.types import STEP_TIME_BOUNDS_S, Durations


class StepTimes:
    """Counts durations by size. One thread adds, any thread may look."""

    def __init__(self) -> None:
        self._counts = [0] * (len(STEP_TIME_BOUNDS_S) + 1)
        self._sum_s = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect_left(STEP_TIME_BOUNDS_S, seconds)] += 1
        self._sum_s += seconds

    def snapshot(self) -> Durations:
        return Durations(tuple(self._counts), self._sum_s)
