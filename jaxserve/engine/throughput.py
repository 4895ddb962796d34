"""How many tokens a second the engine gets through lately."""

from __future__ import annotations

from math import exp

WINDOW_S = 20.0  # what is older by this much counts a third


class Throughput:
    """Tokens per second of work, prompt and output together; time without work doesn't count."""

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0

    def add(self, num_tokens: int, seconds: float) -> None:
        fade = exp(-seconds / WINDOW_S)
        self._tokens = self._tokens * fade + num_tokens
        self._seconds = self._seconds * fade + seconds

    @property
    def tokens_per_s(self) -> float:
        return self._tokens / self._seconds if self._seconds else 0.0
