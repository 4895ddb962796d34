"""A compiled grammar, and where one answer stands in it."""

from __future__ import annotations

import numpy as np
from llguidance import LLMatcher

from jaxserve.errors import GrammarError, GrammarLimitError

_NOT_ALLOWED = "doesn't satisfy the grammar"  # what llguidance says of ids; all else that fails is a limit


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
        """Take the id that was sampled. Raises GrammarError for one that the last mask had not allowed, and
        GrammarLimitError when taking it is more work than a step may be."""
        if not self.is_complete and not self._matcher.consume_token(token_id):
            raise self._failure()

    def fill(self, words: np.ndarray) -> None:
        """Set `words`, int32 [ceil(V / 32)]: bit i % 32 of word i // 32 tells whether id i may come next.

        Raises GrammarLimitError when this is more work than a step may be.
        """
        self._matcher.unsafe_compute_mask_ptr(words.ctypes.data, words.nbytes)
        if self._matcher.is_error():
            raise self._failure()

    @property
    def is_complete(self) -> bool:
        """Nothing but an end-of-sequence id can follow, or one has come."""
        return self._matcher.is_stopped() and not self._matcher.is_error()

    def _failure(self) -> GrammarError:
        reason = self._matcher.get_error().partition("\n")[0]
        return GrammarError(reason) if _NOT_ALLOWED in reason else GrammarLimitError(reason)
