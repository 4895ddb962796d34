"""Where special tokens stand in a text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

_ID = ""  # a trie node's key for "a token ends here"; all other keys are single characters


class SpecialSplitter:
    """Finds special tokens by their text: the leftmost, and there the longest.

    Time is linear in the text (times the longest token), with thousands of special tokens too.
    """

    def __init__(self, ids_by_text: Mapping[str, int]):
        self._trie: dict[str, Any] = {}
        for text, token_id in ids_by_text.items():
            node = self._trie
            for char in text:
                node = node.setdefault(char, {})
            node[_ID] = token_id
        firsts = "".join(re.escape(char) for char in self._trie)
        self._candidate = re.compile(f"[{firsts}]") if firsts else None

    def split(self, text: str) -> Iterator[str | int]:
        """The text in order, in non-empty pieces of plain text (str) and special tokens (their id)."""
        start = position = 0
        while self._candidate and (match := self._candidate.search(text, position)):
            position = match.start()
            token_id, end = self._longest(text, position)
            if token_id is None:
                position += 1
                continue
            if position > start:
                yield text[start:position]
            yield token_id
            start = position = end
        if start < len(text):
            yield text[start:]

    def _longest(self, text: str, position: int) -> tuple[int | None, int]:
        """Id and end of the longest token that starts here; None and the start if there is none."""
        node, found, end = self._trie, None, position
        for i in range(position, len(text)):
            if (child := node.get(text[i])) is None:
                break
            node = child
            if _ID in node:
                found, end = node[_ID], i + 1
        return found, end
