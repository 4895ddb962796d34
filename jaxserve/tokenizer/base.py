"""What the rest of jaxserve needs of a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class Tokenizer(Protocol):
    """Text to ids and back. Implementations are immutable and safe to use from several threads."""

    vocab_size: int  # ids are in [0, vocab_size); may be smaller than the model's padded vocabulary
    bos_id: int | None
    eos_id: int | None  # the one that ends a text, for chat templates that spell it
    eos_ids: frozenset[int]  # every id that ends a turn or a text
    add_bos: bool  # the model wants BOS at the start of a text

    def encode(self, text: str, *, add_bos: bool = False, parse_special: bool = True) -> list[int]:
        """Ids of `text`. With `parse_special`, the text of a special token becomes its id.

        Raises RequestError for text that is no Unicode (a lone surrogate, as JSON can carry).
        """
        ...

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD. Equals the joined incremental stream."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes this id stands for, its leading space included; special ids give their text.

        An id outside the vocabulary (a padded row of the model's output) gives b"".
        """
        ...

    def is_special(self, token_id: int) -> bool: ...

    def token_text(self, token_id: int) -> str:
        """The token as the vocabulary spells it, for people (`/tokenize`, logprobs)."""
        ...
