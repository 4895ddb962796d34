"""What an answer must look like: named grammars that refer to each other, as plain text.

A spec is what a request asked for, before anything is compiled: equal texts are compiled once. The grammar
called "main" is where an answer begins.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from llguidance import LLMatcher

from jaxserve.errors import RequestError
from jaxserve.grammar.trial import ANY_NOTATION

MAX_GRAMMAR_CHARS = 256 * 1024  # of a source, and of all those of a request together
MAX_CHOICES = 4096
_CONTROL = re.compile("[\x7f-\x9f\u2028\u2029]")
ANY_TEXT = r"/(.|\n)*/"  # in Lark
# Between the tokens of JSON: room for any indentation, but no endless run of blanks.
_JSON_OPTIONS = {"whitespace_pattern": r"[ \n\r\t]{1,64}", "lenient": False}

Kind = Literal["json_schema", "lark_grammar", "any_grammar"]
Part = tuple[str, Kind, str]  # name, kind, source


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """`param` is the request's field to blame for a mistake in the `parts`."""

    parts: tuple[Part, ...]
    param: str

    @property
    def source(self) -> str:
        """In llguidance's own format, but for a grammar whose notation is not known yet."""
        grammars: list[dict[str, Any]] = []
        for name, kind, text in self.parts:
            grammars.append({"name": name, kind: json.loads(text) if kind == "json_schema" else text})
        return json.dumps({"grammars": grammars})

    def check_size(self) -> None:
        """Raises RequestError if the parts are longer together than what is compiled for a request."""
        num_chars = sum(len(text) for _, _, text in self.parts)
        if num_chars > MAX_GRAMMAR_CHARS:
            raise RequestError(
                f"the schemas and grammars of '{self.param}' have {num_chars} characters together, at most "
                f"{MAX_GRAMMAR_CHARS} are compiled for a request.",
                param=self.param,
            )

    def renamed(self, name: str) -> tuple[Part, ...]:
        """The parts, with "main" called `name`, to be referred to as @name by another grammar."""
        return tuple((name if own == "main" else own, kind, text) for own, kind, text in self.parts)


def json_schema(schema: Any, param: str) -> GrammarSpec:
    """JSON that `schema`, a JSON Schema, describes. It may be given as its text."""
    return GrammarSpec((("main", "json_schema", schema_text(schema, param)),), param)


def json_object(param: str) -> GrammarSpec:
    """Any JSON object."""
    return json_schema({"type": "object"}, param)


def regex(pattern: str, param: str) -> GrammarSpec:
    """Text that matches `pattern` as a whole, so anchors at its ends change nothing."""
    _check_size(pattern, param)
    pattern = pattern.removeprefix("^")
    if pattern.endswith("$") and (len(pattern) - len(pattern[:-1].rstrip("\\"))) % 2:
        pattern = pattern[:-1]
    made = json.loads(LLMatcher.grammar_from_regex(pattern))
    return GrammarSpec((("main", "lark_grammar", made["grammars"][0]["lark_grammar"]),), param)


def choice(options: Sequence[str], param: str) -> GrammarSpec:
    """Exactly one of `options`."""
    if not options or any(not option for option in options):
        raise RequestError(f"'{param}' must have at least one choice, and none that is empty.", param=param)
    if len(options) > MAX_CHOICES:
        raise RequestError(f"'{param}' has {len(options)} choices, at most {MAX_CHOICES} fit.", param=param)
    text = "start: CHOICE\nCHOICE: " + " | ".join(map(quote, options))  # one terminal: no work for the parser
    _check_size(text, param)
    return GrammarSpec((("main", "lark_grammar", text),), param)


def grammar(text: str, param: str) -> GrammarSpec:
    """A context-free grammar, in Lark's or in llama.cpp's (GBNF) notation."""
    _check_size(text, param)
    return GrammarSpec((("main", ANY_NOTATION, text),), param)


def schema_text(schema: Any, param: str) -> str:
    """The JSON Schema as text, with our options for what a schema leaves open."""
    if isinstance(schema, str):
        _check_size(schema, param)
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise RequestError(f"'{param}' is a string, but no JSON.", param=param) from None
    if not isinstance(schema, dict | bool):
        raise RequestError(f"'{param}' must be a JSON Schema: an object, true or false.", param=param)
    if isinstance(schema, dict):
        # The schema's own "x-guidance" could switch checks off or whitespace on.
        schema = {**schema, "x-guidance": _JSON_OPTIONS}
    text = json.dumps(schema, ensure_ascii=False)
    _check_size(text, param)
    return text


def quote(text: str) -> str:
    """`text` as a literal in Lark, which takes JSON's escapes but no control characters."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", json.dumps(text, ensure_ascii=False))


def _check_size(text: str, param: str) -> None:
    if len(text) > MAX_GRAMMAR_CHARS:
        raise RequestError(
            f"'{param}' has {len(text)} characters, at most {MAX_GRAMMAR_CHARS} are compiled.", param=param
        )
