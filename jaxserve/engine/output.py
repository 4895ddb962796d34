"""From one request's ids to text that is safe to show, and to the end of it."""

from __future__ import annotations

from jaxserve.tokenizer.base import Tokenizer
from jaxserve.tokenizer.detokenizer import IncrementalDetokenizer
from jaxserve.types import FinishReason, SamplingParams

# What one token brought: text, finish_reason, stop_reason. The text may be empty: a part of a character
# or of a stop string waits. A plain tuple, because one is made for every token of every request.
Output = tuple[str, FinishReason | None, str | int | None]


class StopMatcher:
    """Cuts a stream of text at the first stop string, and never lets a part of one through.

    The stop string that is complete first wins, and of those complete at the same character the longest;
    so the result does not depend on how the text was split into pieces. Cost per character: one step of
    Knuth-Morris-Pratt for each stop string, whatever its length.
    """

    def __init__(self, stops: tuple[str, ...], include_in_output: bool):
        self._stops = stops
        self._failures = [_failure_table(stop) for stop in stops]
        self._matched = [0] * len(stops)  # characters of each stop that the text now ends with
        self._include_in_output = include_in_output
        self._held = ""

    def push(self, text: str, *, may_end: bool = True) -> tuple[str, str | None]:
        """Return the text that is safe now and, if one is complete, the stop string that ends it.

        Unless it `may_end`, a stop string that is complete in this text is text like any other.
        """
        pending = self._held + text
        for i, char in enumerate(text, len(self._held)):
            found = None
            for which, stop in enumerate(self._stops):
                failure, matched = self._failures[which], self._matched[which]
                while matched and stop[matched] != char:
                    matched = failure[matched]
                if stop[matched] == char:
                    matched += 1
                self._matched[which] = matched
                if matched == len(stop):
                    if not may_end:
                        self._matched[which] = failure[matched]
                    elif found is None or matched > len(found):
                        found = stop
            if found is not None:
                self._held = ""
                end = i + 1
                return pending[: end if self._include_in_output else end - len(found)], found
        safe = len(pending) - max(self._matched)
        self._held = pending[safe:]
        return pending[:safe], None

    def flush(self) -> str:
        """The text held back, once it is known that no more will come."""
        held, self._held = self._held, ""
        return held


class OutputProcessor:
    """Ids of one request, in order, to text and finish reason.

    Of several reasons to end at the same token an end-of-sequence or stop token comes before a stop
    string, and that before the length; but a stop string that the text up to a stop token completes, by
    the bytes the detokenizer still held, cuts the text and is the reason.
    """

    __slots__ = (
        "_detokenizer", "_end_ids", "_eos_ids", "_matcher", "_max_tokens", "_min_tokens", "_num_tokens",
    )  # fmt: skip

    def __init__(
        self,
        params: SamplingParams,
        tokenizer: Tokenizer,
        eos_ids: frozenset[int],
        whole: dict[int, str] | None = None,  # see IncrementalDetokenizer
    ):
        self._eos_ids = frozenset() if params.ignore_eos else eos_ids
        self._end_ids = self._eos_ids | params.stop_token_ids
        self._max_tokens, self._min_tokens = params.max_tokens, params.min_tokens
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special=params.skip_special_tokens, shown_ids=params.shown_ids, whole=whole
        )
        self._matcher = StopMatcher(params.stop, params.include_stop_str_in_output) if params.stop else None
        self._num_tokens = 0

    def add(self, token_id: int) -> Output:
        """Take the next id. After an Output with a finish_reason nothing more may be added."""
        self._num_tokens += 1
        if token_id in self._end_ids:
            return self._end("", "stop", None if token_id in self._eos_ids else token_id)
        text = self._detokenizer.add(token_id)
        if self._matcher is not None:
            text, stop = self._matcher.push(text, may_end=self._num_tokens > self._min_tokens)
            if stop is not None:
                return text, "stop", stop
        if self._num_tokens == self._max_tokens:
            return self._end(text, "length", None)
        return text, None, None

    def flush(self) -> str:
        """The rest of the text when the request ends for a reason outside of it."""
        return self._end("", "abort", None)[0]

    def _end(self, text: str, reason: FinishReason, stop_reason: int | None) -> Output:
        rest = self._detokenizer.finish()
        if self._matcher is None:
            return text + rest, reason, stop_reason
        rest, stop = self._matcher.push(rest, may_end=self._num_tokens > self._min_tokens)
        if stop is not None:
            return text + rest, "stop", stop
        return text + rest + self._matcher.flush(), reason, stop_reason


def _failure_table(stop: str) -> list[int]:
    """table[n]: length of the longest proper suffix of stop[:n] that is also a prefix of it.

    Source: Knuth, Morris, Pratt 1977, "Fast pattern matching in strings".
    """
    table = [0] * (len(stop) + 1)
    matched = 0
    for n in range(1, len(stop)):
        while matched and stop[matched] != stop[n]:
            matched = table[matched]
        if stop[matched] == stop[n]:
            matched += 1
        table[n + 1] = matched
    return table
