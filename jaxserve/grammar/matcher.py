"""A compiled grammar, and where one answer stands in it."""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher

from jaxserve.errors import GrammarError


class CompiledGrammar:
    """Immutable; many answers may start from it, on any thread."""

    def __init__(self, prototype: LLMatcher):
        self._prototype = prototype

    def start(self) -> Matcher:
        """The state before the first token of an answer, independent of all others."""
        return Matcher(self._prototype.deep_copy())


class Matcher:
    """Owned by one answer: calls must not overlap. The costly ones leave other threads running.

    At the end of the grammar the end-of-sequence ids alone are allowed; where the grammar may end, they are
    among the allowed. After one of them nothing changes any more.
    """

    def __init__(self, matcher: LLMatcher):
        self._matcher = matcher

    def advance(self, token_id: int) -> None:
        """Take the id that was sampled. Raises GrammarError for one that the last mask had not allowed."""
        if not self.is_complete and not self._matcher.consume_token(token_id):
            raise GrammarError(_first_line(self._matcher.get_error()))

    def fill(self, words: np.ndarray) -> None:
        """Set `words`, int32 [ceil(V / 32)]: bit i % 32 of word i // 32 tells whether id i may come next.

        Raises GrammarError when this step takes more work than a step may.
        """
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise GrammarError(_first_line(self._matcher.get_error()))

    @property
    def is_complete(self) -> bool:
        """Nothing but an end-of-sequence id can follow, or one has come."""
        return self._matcher.is_stopped() and not self._matcher.is_error()


def _first_line(text: str) -> str:
    return text.partition("\n")[0]
