"""Tools that a chat offers, and calls in its messages."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, PlainValidator

from jaxserve.server.schema.body import Body
from jaxserve.server.schema.errors import invalid

MAX_TOOLS = 128
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]


class FunctionBody(Body):
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON Schema; absent: the function takes none
    strict: bool = False  # a call follows `parameters`, even where the model is free not to call


class Tool(Body):
    type: Literal["function"]
    function: FunctionBody


class CalledFunction(Body):
    name: str
    arguments: str = "{}"


class MessageCall(Body):
    """A call in a message of the assistant, as this API gave it."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


def _choice(value: object) -> str | dict[str, Any]:
    if value in ("none", "auto", "required"):
        return str(value)
    match value:
        case {"type": "function", "function": {"name": str(name)}}:
            return {"type": "function", "function": {"name": name}}
    raise invalid(
        'expected "none", "auto", "required" or {"type": "function", "function": {"name": "..."}}'
    )


class NamedFunction(Body):
    name: str


class NamedChoice(Body):
    type: Literal["function"]
    function: NamedFunction


ToolChoice = Annotated[
    str | dict[str, Any],
    PlainValidator(_choice, json_schema_input_type=Literal["none", "auto", "required"] | NamedChoice),
]
Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS), FailFast()]
