"""The body of /v1/responses."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field, PlainValidator

from jaxserve.server.schema.body import Body, object_of, validate
from jaxserve.server.schema.errors import invalid
from jaxserve.server.schema.fields import Int
from jaxserve.server.schema.generation import MAX_LABELS, MAX_PRIORITY, MAX_SALT_CHARS, Label
from jaxserve.server.schema.sampling import SamplingBody
from jaxserve.server.schema.tools import MAX_TOOLS, Name


class TextPart(Body):
    type: Literal["input_text", "output_text", "text"]
    text: str


class ReasoningPart(Body):
    type: Literal["reasoning_text"]
    text: str


Content = str | list[TextPart]


class InputMessage(Body):
    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class InputCall(Body):
    """A call that an earlier answer made."""

    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str


class InputCallOutput(Body):
    """What the function gave back."""

    type: Literal["function_call_output"]
    call_id: str
    output: Content


class InputReasoning(Body):
    """What the model thought before its next message or call."""

    type: Literal["reasoning"]
    content: list[ReasoningPart] = []


InputItem = InputMessage | InputCall | InputCallOutput | InputReasoning
ITEMS: dict[str, type[Body]] = {
    "message": InputMessage,
    "function_call": InputCall,
    "function_call_output": InputCallOutput,
    "reasoning": InputReasoning,
}


def _input(value: object) -> str | list[Any]:
    """Items are validated one by one later, by their types."""
    if isinstance(value, str) or (isinstance(value, list) and value):
        return value
    raise invalid("expected a string, or a list of at least one item")


Input = Annotated[
    str | list[Any],
    PlainValidator(
        _input, json_schema_input_type=str | Annotated[list[InputItem], Field(min_length=1)]
    ),
]


class FunctionTool(Body):
    type: Literal["function"]
    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool = False


class ChosenFunction(Body):
    type: Literal["function"]
    name: str


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema_: Annotated[Any, Field(alias="schema")] = None
    strict: bool = False


class TextOptions(Body):
    format: TextFormat | None = None


class ResponsesStreamOptions(Body):
    include_obfuscation: Literal[False] = False  # padding against traffic analysis: not there


class ResponsesBody(SamplingBody):
    model: str | None = None
    input: Input
    instructions: str | None = None  # a system message before all others
    max_output_tokens: Annotated[Int, Field(ge=1, lt=2**31)] | None = None
    stream: bool = False
    stream_options: ResponsesStreamOptions | None = None
    text: TextOptions | None = None
    tools: Annotated[list[FunctionTool], Field(max_length=MAX_TOOLS), FailFast()] = []
    tool_choice: Literal["none", "auto", "required"] | ChosenFunction | None = None
    parallel_tool_calls: bool = True
    priority: Annotated[Int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    # Labels and hints of the client's own; the answer repeats `metadata`.
    metadata: Annotated[dict[Label, Annotated[str, Field(max_length=512)]], Field(max_length=MAX_LABELS)] = {}
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None


REFUSED_RESPONSES: dict[str, tuple[Any, ...]] = {
    "store": (False,),  # nothing is kept
    "previous_response_id": (),
    "conversation": (),
    "prompt": (),
    "background": (False,),
    "include": ([],),
    "truncation": ("disabled",),
    "reasoning": ({},),
    "max_tool_calls": (),
    "top_logprobs": (0,),
    "service_tier": ("auto", "default"),
}


def validate_responses(body: object) -> ResponsesBody:
    """The request in `body`; raises RequestError that names the field."""
    return validate(ResponsesBody, object_of(body), REFUSED_RESPONSES)
