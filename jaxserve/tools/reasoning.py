"""The part of an answer that a model thinks before it speaks: <think> ... </think>."""

from __future__ import annotations

from jaxserve.tools.pieces import Piece, TextParser, held_back, joined

OPEN, CLOSE = "<think>", "</think>"
_BLANKS = " \t\n\r"


class ThinkParser:
    """A TextParser. Reasoning stands at the beginning of an answer or nowhere.

    `is_open`: the prompt ends with the opening tag, so the answer begins inside. Blanks at both ends of the
    reasoning and before the content behind it are dropped. Without a closing tag all is reasoning.
    """

    def __init__(self, is_open: bool):
        self._phase = "reasoning" if is_open else "before"
        self._held = ""
        self._begun = False  # something of the phase at hand has been shown

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        if self._phase == "before":
            bare = self._held.lstrip(_BLANKS)
            if not bare or (OPEN.startswith(bare) and bare != OPEN):
                return []
            if bare.startswith(OPEN):
                self._phase, self._held = "reasoning", bare[len(OPEN) :]
            else:
                self._phase = "content"
                self._begun = True  # no reasoning: blanks before it stay
        if self._phase == "reasoning":
            inside, tag, behind = self._held.partition(CLOSE)
            if tag:
                pieces += self._reasoning(inside.rstrip(_BLANKS))
                self._phase, self._held, self._begun = "content", behind, False
            else:
                safe = inside[: len(inside) - held_back(inside, CLOSE)].rstrip(_BLANKS)
                pieces += self._reasoning(safe)
                if safe:
                    self._held = inside[len(safe) :]
        if self._phase == "content":
            text = self._held if self._begun else self._held.lstrip(_BLANKS)
            self._held = ""
            if text:
                self._begun = True
                pieces.append(Piece("content", text))
        return joined(pieces)

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._phase == "reasoning":
            return joined(self._reasoning(held.rstrip(_BLANKS)))
        return joined([Piece("content", held)])

    def _reasoning(self, text: str) -> list[Piece]:
        if not self._begun:
            text = text.lstrip(_BLANKS)
            self._begun = bool(text)
        return [Piece("reasoning", text)]


class AnswerParser:
    """A TextParser over both: what is not reasoning may hold tool calls, those past `most_calls` dropped."""

    def __init__(
        self, think: ThinkParser | None, calls: TextParser | None, most_calls: int | None = None
    ):
        self._think, self._calls, self._most_calls = think, calls, most_calls

    def push(self, text: str) -> list[Piece]:
        pieces = [Piece("content", text)] if self._think is None else self._think.push(text)
        return self._through_calls(pieces)

    def finish(self) -> list[Piece]:
        pieces = [] if self._think is None else self._think.finish()
        pieces = self._through_calls(pieces)
        if self._calls is not None:
            pieces += self._limited(self._calls.finish())
        return joined(pieces)

    def _through_calls(self, pieces: list[Piece]) -> list[Piece]:
        if self._calls is None:
            return pieces
        out: list[Piece] = []
        for piece in pieces:
            out += self._limited(self._calls.push(piece.text)) if piece.kind == "content" else [piece]
        return joined(out)

    def _limited(self, pieces: list[Piece]) -> list[Piece]:
        most = self._most_calls
        if most is None:
            return pieces
        return [p for p in pieces if p.kind not in ("call", "arguments") or p.index < most]
