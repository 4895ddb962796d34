"""The side of a tokenizer that both kinds share: a table of what each id stands for."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.errors import RequestError


@dataclass(frozen=True, slots=True)
class Boundaries:
    """Where texts of this model begin and end; the fields are those of the Tokenizer protocol."""

    bos_id: int | None
    eos_id: int | None
    eos_ids: frozenset[int]
    add_bos: bool


class TableTokenizer(ABC):
    """Decoding by table: an id's bytes are known at load time, whatever stands before it.

    The leading space of a token is part of its bytes, for the first id of a sequence too: the text of a
    completion starts with the space that separates it from its prompt. A model whose tokenizer puts a
    space before every text ("dummy prefix") therefore gives `decode(encode("a")) == " a"`.
    """

    def __init__(
        self, texts: Sequence[str], raw: Sequence[bytes], special: frozenset[int], boundaries: Boundaries
    ):
        self._texts = texts
        self._raw = raw
        self._shown = [b"" if i in special else token for i, token in enumerate(raw)]
        self._special = special
        self.vocab_size = len(texts)
        self.boundaries = boundaries
        self.bos_id = boundaries.bos_id
        self.eos_id = boundaries.eos_id
        self.eos_ids = boundaries.eos_ids
        self.add_bos = boundaries.add_bos

    def encode(self, text: str, *, add_bos: bool = False, parse_special: bool = True) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"text holds U+{ord(text[error.start]):04X} at character {error.start}: half of a "
                f"surrogate pair is no character; send the pair or leave it out",
                code="invalid_text",
            ) from error
        ids = self._encode(text, parse_special)
        if add_bos and self.bos_id is not None:
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        table, size = (self._shown if skip_special else self._raw), self.vocab_size
        return b"".join([table[i] for i in ids if 0 <= i < size]).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._raw[token_id] if 0 <= token_id < self.vocab_size else b""

    def is_special(self, token_id: int) -> bool:
        return token_id in self._special

    def token_text(self, token_id: int) -> str:
        return self._texts[token_id] if 0 <= token_id < self.vocab_size else ""

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of control tokens: never part of what a user reads."""
        return self._special

    @abstractmethod
    def _encode(self, text: str, parse_special: bool) -> list[int]: ...

    @abstractmethod
    def write(self, folder: Path) -> Mapping[str, Any]:
        """Write the vocabulary's own file; return what belongs into tokenizer_config.json beside it."""
