"""The types of single fields, where pydantic's own would not do."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator, Field, PlainValidator

from jaxserve.server.schema.errors import invalid, shown
from jaxserve.types import MAX_BAD_WORD_SEQUENCES, MAX_LOGIT_BIAS

MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024  # of a stop string or a bad word
MAX_BAD_WORDS = MAX_BAD_WORD_SEQUENCES // 2  # each counts with and without a space in front of it
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")


def _integral(value: object) -> object:
    """JSON has one kind of number: 16.0 is an integer, 16.5 and true are not."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _split_prompt(value: object) -> list[str | list[int]]:
    """A string, strings, ids or lists of ids, as the list of prompts they stand for.

    Written by hand: a union of lists would report an error for every element of a long prompt.
    """
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(isinstance(item, str) for item in value):
            return list(value)
        if all(type(item) is int for item in value):
            return [value]
        if all(isinstance(item, list) and all(type(i) is int for i in item) for item in value):
            return list(value)
    elif isinstance(value, list):
        raise invalid("must not be empty")
    raise invalid("expected a string, a list of strings, a list of token ids or a list of such lists")


def _check_strings(value: object, most: int, shape: str, why_none_empty: str) -> list[str]:
    """A list of up to `most` strings, none of them empty or very long."""
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise invalid(f"expected {shape} of up to {most} strings")
    if len(value) > most:
        raise invalid(f"has {len(value)} strings, at most {most} are allowed")
    if "" in value:
        raise invalid(f"has an empty string, which would {why_none_empty}; leave it out")
    if any(len(item) > MAX_STOP_CHARS for item in value):
        raise invalid(f"has a string longer than {MAX_STOP_CHARS} characters")
    return value


def _split_stop(value: object) -> list[str]:
    """One stop string or several."""
    stops = [value] if isinstance(value, str) else value
    return _check_strings(stops, MAX_STOP_STRINGS, "a string or a list", "end every answer at once")


def _read_logit_bias(value: object) -> dict[int, float]:
    """OpenAI's form: ids as strings, for JSON has no other keys."""
    if not isinstance(value, dict):
        raise invalid('expected an object like {"50256": -100}')
    if len(value) > MAX_LOGIT_BIAS:
        raise invalid(f"has {len(value)} token ids, at most {MAX_LOGIT_BIAS} are allowed")
    found = {}
    for key, bias in value.items():
        if not isinstance(key, str) or not _TOKEN_ID.fullmatch(key):
            raise invalid(f"has the key {shown(key)}, which is no token id: write it in digits")
        if isinstance(bias, bool) or not isinstance(bias, int | float) or not -100 <= bias <= 100:
            raise invalid(f"must have numbers from -100 to 100, token id {key} has {shown(bias)}")
        found[int(key)] = float(bias)
    return found


def _check_bad_words(value: object) -> list[str]:
    return _check_strings(value, MAX_BAD_WORDS, "a list", "be everywhere")


def _some_token_ids(value: object) -> list[int]:
    """One id or more. By hand: there may be as many as the vocabulary has, and one error is enough."""
    if not isinstance(value, list):
        raise invalid("expected a list of token ids")
    if not value:
        raise invalid("must have at least one token id: nothing could be picked")
    for i, token_id in enumerate(value):
        if type(token_id) is not int or token_id < 0:
            raise invalid(f"must have token ids only, the one at {i} is {shown(token_id)}")
    return value


def _join_content(value: object) -> str:
    """A message's content, a string or text parts, as one text; parts stand on lines of their own."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise invalid("expected a string or a list of parts")
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            what = f"type {shown(kind)}" if isinstance(kind, str) and kind != "text" else "no such shape"
            raise invalid(f'must be text: part {i} has {what}; send {{"type": "text", "text": "..."}}')
        texts.append(part["text"])
    return "\n".join(texts)


Int = Annotated[int, BeforeValidator(_integral)]
TokenId = Annotated[Int, Field(ge=0)]
Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_split_prompt, json_schema_input_type=str | list[str] | list[int] | list[list[int]]),
]
StopStrings = Annotated[list[str], PlainValidator(_split_stop, json_schema_input_type=str | list[str])]
Content = Annotated[str, PlainValidator(_join_content, json_schema_input_type=str | list[dict[str, str]])]
_Ids = Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1)]
SomeTokenIds = Annotated[list[int], PlainValidator(_some_token_ids, json_schema_input_type=_Ids)]
_BiasKey = Annotated[str, Field(pattern=f"^({_TOKEN_ID.pattern})$")]
_Biases = Annotated[
    dict[_BiasKey, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_LOGIT_BIAS)
]
LogitBias = Annotated[dict[int, float], PlainValidator(_read_logit_bias, json_schema_input_type=_Biases)]
_Word = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
_Words = Annotated[list[_Word], Field(max_length=MAX_BAD_WORDS)]
BadWords = Annotated[list[str], PlainValidator(_check_bad_words, json_schema_input_type=_Words)]
