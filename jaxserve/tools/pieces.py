"""What an answer's text is made of: shown text, reasoning and tool calls, in order."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol

Kind = Literal["content", "reasoning", "call", "arguments"]


@dataclass(frozen=True, slots=True)
class Piece:
    """`call` begins call number `index`, `text` is its function's name; `arguments` are more of its JSON."""

    kind: Kind
    text: str
    index: int = 0


class TextParser(Protocol):
    """Takes an answer's text as it comes. What it gives, joined, doesn't depend on how the text was cut."""

    def push(self, text: str) -> list[Piece]: ...

    def finish(self) -> list[Piece]:
        """What was held back, once it is known that no more will come."""
        ...


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same with neighbours of one kind as one, and without empty texts."""
    out: list[Piece] = []
    for piece in pieces:
        if out and piece.kind != "call" and (out[-1].kind, out[-1].index) == (piece.kind, piece.index):
            out[-1] = Piece(piece.kind, out[-1].text + piece.text, piece.index)
        elif piece.text:
            out.append(piece)
    return out


def held_back(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0
