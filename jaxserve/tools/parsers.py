"""Tool calls in the text of an answer, in the formats that models are trained to write.

Each parser is a machine that takes a character at a time, so where the text is cut can't matter. Blanks next
to a call are dropped; text without a call comes out as it went in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import ClassVar

from jaxserve.tools.pieces import Piece, held_back, joined
from jaxserve.tools.reading import CallReader, Status, ValueReader

_BLANKS = " \t\n\r"
_NAME_CHARS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-")
# A state takes the next character, yields pieces, and sets the state for the one after.
State = Callable[[str], Iterator[Piece]]


class CallParser(ABC):
    """A TextParser. `names` are the functions that the request offers.

    A call that is cut off stays as it is: what has been told of it is told.
    """

    def __init__(self, names: frozenset[str]):
        self._names = names
        self._index = -1  # of the call at hand
        self._state: State = self._begin
        self._blanks = ""  # at the end of the content so far: dropped if a call follows
        self._is_after_call = False  # blanks that come now are dropped
        self._raw = ""  # what may still turn out to be content
        self._reader = CallReader()

    def push(self, text: str) -> list[Piece]:
        pieces: list[Piece] = []
        for char in text:
            pieces += self._state(char)
        return joined(pieces)

    def finish(self) -> list[Piece]:
        raw, self._raw = self._raw, ""
        pieces = [*self._content(raw), Piece("content", self._blanks)]
        self._blanks = ""
        return joined(pieces)

    @abstractmethod
    def _begin(self, char: str) -> Iterator[Piece]:
        """The state in which an answer begins."""

    def _content(self, text: str) -> Iterator[Piece]:
        """`text` is content; blanks at its end wait for what follows."""
        if self._is_after_call:
            text = text.lstrip(_BLANKS)
        if kept := text.rstrip(_BLANKS):
            yield Piece("content", self._blanks + kept)
            self._blanks = ""
            self._is_after_call = False
        if not self._is_after_call:
            self._blanks += text[len(kept) :]

    def _call(self, name: str) -> Piece:
        self._index += 1
        self._blanks = ""
        self._is_after_call = True
        return Piece("call", name, self._index)

    def _read(self, char: str, after: State, broken: State) -> Iterator[Piece]:
        """Give the object at hand a character; go on in `after` behind it, in `broken` if it is no call."""
        reader = self._reader
        num_taken = len(reader.raw)
        for kind, text in reader.push(char):
            if kind == "name":
                if not self._accepts(text):
                    reader.status = Status.BROKEN
                    break
                self._raw = ""
                yield self._call(text)
            else:
                yield Piece("arguments", text, self._index)
        if reader.status is Status.OPEN:
            if not reader.has_name:
                self._raw += char
            return
        self._reader = CallReader()
        if reader.status is Status.BROKEN:
            self._raw += char
            self._state = broken
            yield from self._reread()
            return
        if not reader.has_arguments:
            yield Piece("arguments", "{}", self._index)
        self._state = after
        if len(reader.raw) == num_taken:  # it ended before this character
            yield from self._state(char)

    def _reread(self) -> Iterator[Piece]:
        """What was taken for a call goes through the state at hand as content."""
        raw, self._raw = self._raw, ""
        yield from self._content(raw)

    def _accepts(self, name: str) -> bool:
        return True


class MarkedParser(CallParser):
    """Calls that follow a marker, with content before, between and behind them."""

    marker: ClassVar[str]

    def _begin(self, char: str) -> Iterator[Piece]:
        text = self._raw + char
        self._raw = ""
        if text.endswith(self.marker):
            yield from self._content(text[: -len(self.marker)])
            self._raw = self.marker
            self._state = self._marked
            return
        held = held_back(text, self.marker)
        yield from self._content(text[: len(text) - held])
        self._raw = text[len(text) - held :]

    @abstractmethod
    def _marked(self, char: str) -> Iterator[Piece]:
        """The state behind a marker."""


class HermesParser(MarkedParser):
    """<tool_call>{"name": ..., "arguments": ...}</tool_call>: Hermes, Qwen 2.5 and 3, and many others."""

    marker = "<tool_call>"
    end = "</tool_call>"

    def _marked(self, char: str) -> Iterator[Piece]:
        yield from self._read(char, self._ended, self._begin)

    def _ended(self, char: str) -> Iterator[Piece]:
        """Behind an object: the end marker, or whatever stands in its place."""
        text = self._raw + char
        if not text.strip(_BLANKS) or (self.end.startswith(text.lstrip(_BLANKS)) and text.lstrip(_BLANKS)):
            self._raw = text
            if text.endswith(self.end):
                self._raw, self._state = "", self._begin
            return
        self._raw, self._state = "", self._begin
        for one in text:
            yield from self._begin(one) if self._state == self._begin else self._state(one)


class MistralParser(MarkedParser):
    """[TOOL_CALLS] and a list of objects, or [TOOL_CALLS]name[ARGS]{...}, as newer models write."""

    marker = "[TOOL_CALLS]"
    _arguments_markers = ("[ARGS]", "[CALL_ID]")

    def _marked(self, char: str) -> Iterator[Piece]:
        self._raw += char
        if char in _BLANKS:
            return
        if char == "[":
            self._state = self._in_list
        elif char in _NAME_CHARS:
            self._name = char
            self._state = self._in_name
        elif char == "{":
            self._raw = self._raw[:-1]
            self._state = self._in_list
            yield from self._state(char)
        else:
            self._state = self._begin
            yield from self._reread()

    def _in_list(self, char: str) -> Iterator[Piece]:
        yield from self._read(char, self._between, self._begin)

    def _between(self, char: str) -> Iterator[Piece]:
        if char == ",":
            self._state = self._in_list
        elif char == "]":
            self._state = self._begin
        elif char not in _BLANKS:
            self._state = self._begin
            yield from self._begin(char)

    def _in_name(self, char: str) -> Iterator[Piece]:
        self._raw += char
        if char in _NAME_CHARS:
            self._name += char
        elif char == "[":
            self._mark = char
            self._state = self._in_mark
        elif char == "{":
            yield from self._begin_arguments(char)
        elif char not in _BLANKS:
            self._state = self._begin
            yield from self._reread()

    def _in_mark(self, char: str) -> Iterator[Piece]:
        """[ARGS], or [CALL_ID] and an id that is not ours."""
        self._raw += char
        self._mark += char
        if self._mark == "[ARGS]":
            self._state = self._before_arguments
        elif self._mark.startswith("[CALL_ID]"):
            rest = self._mark[len("[CALL_ID]") :]
            if rest.endswith("[ARGS]"):
                self._state = self._before_arguments
            elif rest.endswith("{"):
                yield from self._begin_arguments(char)
        elif not any(mark.startswith(self._mark) for mark in self._arguments_markers):
            self._state = self._begin
            yield from self._reread()

    def _before_arguments(self, char: str) -> Iterator[Piece]:
        self._raw += char
        if char == "{":
            yield from self._begin_arguments(char)
        elif char not in _BLANKS:
            self._state = self._begin
            yield from self._reread()

    def _begin_arguments(self, char: str) -> Iterator[Piece]:
        self._raw = ""
        yield self._call(self._name)
        self._value = ValueReader()
        self._state = self._in_arguments
        yield from self._in_arguments(char)

    def _in_arguments(self, char: str) -> Iterator[Piece]:
        self._value.push(char)  # an object: every character is its own, up to the closing one
        yield Piece("arguments", char, self._index)
        if self._value.is_done:
            self._state = self._begin


class JsonParser(CallParser):
    """An answer that is a call from its first character on: an object, several, or a list of them.

    Objects that name none of the offered functions are content. Of several calls the further ones follow
    behind ";", "," or a blank.
    """

    marker = ""  # may stand before it

    def _begin(self, char: str) -> Iterator[Piece]:
        text = self._raw + char
        bare = text.lstrip(_BLANKS)
        self._raw = text
        if not bare or (self.marker.startswith(bare) and bare != self.marker):
            return
        if self.marker and bare == self.marker:
            self._state = self._marked
        else:
            yield from self._open(char)

    def _marked(self, char: str) -> Iterator[Piece]:
        self._raw += char
        if char not in _BLANKS:
            yield from self._open(char)

    def _open(self, char: str) -> Iterator[Piece]:
        """The first character that is neither blank nor of the marker; it stands at the end of `_raw`."""
        if char == "[":
            self._state = self._in_object
        elif char == "{":
            self._raw = self._raw[:-1]
            self._state = self._in_object
            yield from self._in_object(char)
        else:
            self._state = self._plain
            yield from self._reread()

    def _in_object(self, char: str) -> Iterator[Piece]:
        yield from self._read(char, self._between, self._plain)

    def _between(self, char: str) -> Iterator[Piece]:
        if char == "{":
            self._state = self._in_object
            yield from self._in_object(char)
        elif char in ";,":
            self._state = self._separated
        elif char not in _BLANKS and char != "]":
            self._state = self._plain
            yield from self._plain(char)

    def _separated(self, char: str) -> Iterator[Piece]:
        if char == "{" or char not in _BLANKS:
            self._state = self._in_object if char == "{" else self._plain
            yield from self._state(char)

    def _plain(self, char: str) -> Iterator[Piece]:
        yield from self._content(char)

    def _accepts(self, name: str) -> bool:
        return name in self._names


class Llama3Parser(JsonParser):
    """{"name": ..., "parameters": ...}, behind <|python_tag|> or not: Llama 3.1 to 3.3."""

    marker = "<|python_tag|>"
