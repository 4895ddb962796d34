"""The types of single fields, where pydantic's own would not do."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, PlainValidator

from jaxserve.server.schema.errors import invalid, shown

MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024


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


def _split_stop(value: object) -> list[str]:
    """One stop string or up to four, none of them empty."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise invalid(f"expected a string or a list of up to {MAX_STOP_STRINGS} strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise invalid(f"has {len(stops)} strings, at most {MAX_STOP_STRINGS} are allowed")
    if "" in stops:
        raise invalid("has an empty string, which would end every answer at once; leave it out")
    if any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise invalid(f"has a string longer than {MAX_STOP_CHARS} characters")
    return stops


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
