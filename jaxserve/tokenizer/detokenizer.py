"""Ids to text while they are being generated."""

from __future__ import annotations

import codecs

from jaxserve.tokenizer.base import Tokenizer


class IncrementalDetokenizer:
    """Text of one sequence, id by id, in constant time each.

    A character spread over several ids appears with the last of them; a token's leading space is always
    kept (see TableTokenizer). All that was returned, `finish` included, joins to `tokenizer.decode(ids)`.
    Owned by one request; not for several threads.
    """

    __slots__ = ("_bytes_of", "_held", "_is_special", "_shown_ids", "_skip_special", "_whole")

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool = True,
        shown_ids: frozenset[int] = frozenset(),
        whole: dict[int, str] | None = None,
    ):
        """`shown_ids` are special tokens that are not skipped. `whole` remembers the texts of ordinary tokens
        that are whole characters; those who serve the same tokenizer may share it."""
        self._bytes_of = tokenizer.token_bytes
        self._is_special = tokenizer.is_special
        self._skip_special = skip_special
        self._shown_ids = shown_ids
        self._whole = {} if whole is None else whole
        self._held = b""  # of an unfinished character; at most three

    def add(self, token_id: int) -> str:
        """What is certain to be text now; empty for half a character or a skipped special token."""
        held = self._held
        if not held and (known := self._whole.get(token_id)) is not None:
            return known
        is_special = self._is_special(token_id)
        if self._skip_special and is_special and token_id not in self._shown_ids:
            return ""
        raw = held + self._bytes_of(token_id)
        text, num_used = codecs.utf_8_decode(raw, "replace", False)
        self._held = raw[num_used:]
        if not (held or self._held or is_special):
            self._whole[token_id] = text
        return text

    def finish(self) -> str:
        """U+FFFD if the last character never got complete, else nothing. The next text starts afresh."""
        raw, self._held = self._held, b""
        return raw.decode("utf-8", "replace")
