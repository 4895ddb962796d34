"""One call as a JSON object, read character by character: {"name": ..., "arguments": {...}}."""

from __future__ import annotations

import json
from collections.abc import Iterator
from enum import Enum
from typing import Literal

ARGUMENT_KEYS = ("arguments", "parameters")
_BLANKS = " \t\n\r"
_CLOSING = {"{": "}", "[": "]"}

# "name" comes once, with the whole name, before any "arguments", which come in pieces of JSON text.
Found = tuple[Literal["name", "arguments"], str]


class Status(Enum):
    OPEN = "open"
    DONE = "done"
    BROKEN = "broken"  # this is not a call


class ValueReader:
    """The extent of one JSON value. It minds strings and brackets, not whether what is inside is JSON."""

    def __init__(self) -> None:
        self._closers: list[str] = []
        self._in_string = self._is_escaped = False
        self.text = ""
        self.is_done = False

    def push(self, char: str) -> bool:
        """Whether `char` belongs to the value; the first that doesn't ends it."""
        if self._in_string:
            if self._is_escaped:
                self._is_escaped = False
            elif char == "\\":
                self._is_escaped = True
            elif char == '"':
                self._in_string = False
                self.is_done = not self._closers
        elif char in _CLOSING and (self._closers or not self.text):
            self._closers.append(_CLOSING[char])
        elif char == '"' and (self._closers or not self.text):
            self._in_string = True
        elif self._closers:
            if char == self._closers[-1]:
                self._closers.pop()
                self.is_done = not self._closers
        elif char in _BLANKS or char in ",}]":  # the end of a number or a word
            self.is_done = bool(self.text)
            return False
        self.text += char
        return True


class CallReader:
    """Reads one object. `raw` is all that it took in; once it is DONE or BROKEN nothing may be pushed.

    The character at which it breaks is not taken in. It breaks only before the name is told: after that
    whatever is odd ends the call as it stands. A call without arguments has `has_arguments` false.
    """

    def __init__(self) -> None:
        self.status = Status.OPEN
        self.raw = ""
        self._expects = "{"
        self._key: str | None = None
        self._value: ValueReader | None = None
        self._name: str | None = None
        self._early = ""  # arguments that came before the name
        self._is_arguments = False  # the value at hand is the call's arguments
        self.has_arguments = False

    @property
    def has_name(self) -> bool:
        return self._name is not None

    def push(self, char: str) -> Iterator[Found]:
        """Take the next character; yield what it brought."""
        if self._value is not None:
            value = self._value
            was = len(value.text)
            taken = value.push(char)
            if taken:
                self.raw += char
                if self._is_arguments and value.text[:1] in _CLOSING:
                    yield from self._tell(value.text[was:])
            elif not value.is_done:  # no value begins like this
                self._give_up()
            if value.is_done:
                yield from self._end_value(value)
            if taken or self.status is not Status.OPEN:
                return
        if char in _BLANKS:
            self.raw += char
            return
        if self._expects == "value":
            self._value = ValueReader()
            yield from self.push(char)
            return
        self._structure(char)

    def _structure(self, char: str) -> None:
        """A character outside of keys and values."""
        expects = self._expects
        if char not in expects:
            self._give_up()
            return
        if char == '"':
            self._value, self._key = ValueReader(), None
            self._value.push(char)
        elif char == "{":
            self._expects = '"}'
        elif char == ":":
            self._expects = "value"
        elif char == ",":
            self._expects = '"'
        else:
            if self._name is None:
                self._give_up()
                return
            self.status = Status.DONE
        self.raw += char

    def _end_value(self, value: ValueReader) -> Iterator[Found]:
        self._value = None
        if self._expects != "value":  # it was a key
            self._key = _string(value.text)
            self._is_arguments = self._key in ARGUMENT_KEYS and not self.has_arguments
            self._expects = ":"
            return
        self._expects = ",}"
        if self._key == "name" and self._name is None:
            name = _string(value.text)
            if not name:
                self._give_up()
                return
            self._name = name
            yield "name", name
            if self._early:
                yield "arguments", self._early
        elif self._is_arguments and value.text[:1] == '"':
            yield from self._tell(_string(value.text) or "")  # JSON in a string, as OpenAI has it
        elif self._is_arguments and value.text[:1] not in _CLOSING and value.text != "null":
            self._give_up()
        self._is_arguments = False

    def _tell(self, text: str) -> Iterator[Found]:
        if not text:
            return
        self.has_arguments = True
        if self._name is None:
            self._early += text
        else:
            yield "arguments", text

    def _give_up(self) -> None:
        self.status = Status.DONE if self.has_name else Status.BROKEN


def _string(text: str) -> str | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
