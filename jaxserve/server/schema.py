"""What a client may send: the request bodies as pydantic models, and the fields that are refused.

Every body goes through `validate`: fields of `REFUSED_*` must be neutral, the model's own fields must
have the right type and range, null means the default, and names nobody knows are ignored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from jaxserve.errors import RequestError

MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_SALT_CHARS = 256
MAX_PRIORITY = 1000


def _invalid(text: str) -> PydanticCustomError:
    """An error whose text is ours; the template keeps braces in it from being read as fields."""
    return PydanticCustomError("invalid", "{text}", {"text": text})


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
        raise _invalid("must not be empty")
    raise _invalid("expected a string, a list of strings, a list of token ids or a list of such lists")


def _split_stop(value: object) -> list[str]:
    """One stop string or up to four, none of them empty."""
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _invalid(f"expected a string or a list of up to {MAX_STOP_STRINGS} strings")
    if len(stops) > MAX_STOP_STRINGS:
        raise _invalid(f"has {len(stops)} strings, at most {MAX_STOP_STRINGS} are allowed")
    if "" in stops:
        raise _invalid("has an empty string, which would end every answer at once; leave it out")
    if any(len(stop) > MAX_STOP_CHARS for stop in stops):
        raise _invalid(f"has a string longer than {MAX_STOP_CHARS} characters")
    return stops


def _join_content(value: object) -> str:
    """A message's content, a string or text parts, as one text; parts stand on lines of their own."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _invalid("expected a string or a list of parts")
    texts = []
    for i, part in enumerate(value):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind != "text" or not isinstance(part.get("text"), str):
            what = f"type {shown(kind)}" if isinstance(kind, str) and kind != "text" else "no such shape"
            raise _invalid(f'must be text: part {i} has {what}; send {{"type": "text", "text": "..."}}')
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


class Body(BaseModel):
    """Base of everything a client sends: strict types, finite numbers, null stands for the default."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _null_is_default(cls, data: Any) -> Any:
        if isinstance(data, dict):
            return {name: value for name, value in data.items() if value is not None}
        return data


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(Body):
    """Fields that completions and chat share."""

    model: str | None = None  # absent: the model that is served
    max_tokens: Annotated[Int, Field(ge=1, lt=2**31)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[Int, Field(ge=-1, lt=2**31)] = 0  # 0 and -1: off
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[Int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: StopStrings = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS), FailFast()] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Annotated[Int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = None  # seconds from arrival to the last token
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    user: str | None = None  # the client's own label of its end user; nothing depends on it


class CompletionBody(GenerationBody):
    prompt: Prompts


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content = ""
    name: str | None = None


class ChatBody(GenerationBody):
    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    max_completion_tokens: Annotated[Int, Field(ge=1, lt=2**31)] | None = None  # beats max_tokens
    add_generation_prompt: bool = True


# Known fields that are not honoured, and the values that ask for nothing; null is always one of them.
_REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "prompt_logprobs": (False,),
    "return_token_ids": (False,),
    "truncate_prompt_tokens": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "request_id": (),
    "use_beam_search": (False,),
}
REFUSED_COMPLETION = _REFUSED | {
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (),
    "add_special_tokens": (True,),
}
REFUSED_CHAT = _REFUSED | {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (False, True),  # without tools both mean nothing
    "functions": ([],),
    "function_call": ("none", "auto"),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "modalities": (["text"],),
    "audio": (),
    "echo": (False,),
    "add_special_tokens": (False,),
}
REFUSED_MESSAGE: dict[str, tuple[Any, ...]] = {"tool_calls": ([],), "function_call": (), "audio": ()}


def validate_completion(body: object) -> CompletionBody:
    """The completion request in `body`; raises RequestError that names the field."""
    return _validate(CompletionBody, _object(body), REFUSED_COMPLETION)


def validate_chat(body: object) -> ChatBody:
    """The chat request in `body`; raises RequestError that names the field."""
    fields = _object(body)
    messages = fields.get("messages")
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            _refuse(message, REFUSED_MESSAGE, f"messages[{i}].")
    return _validate(ChatBody, fields, REFUSED_CHAT)


def _object(body: object) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise RequestError(f"The request body must be a JSON object, not {shown(body)}.")
    return body


def _validate[B: Body](
    model: type[B], fields: dict[str, Any], refused: Mapping[str, tuple[Any, ...]]
) -> B:
    _refuse(fields, refused)
    try:
        return model.model_validate(fields)
    except ValidationError as exc:
        raise _request_error(exc.errors(include_url=False)[0]) from None


def _refuse(fields: Mapping[str, Any], refused: Mapping[str, tuple[Any, ...]], path: str = "") -> None:
    for name, neutral in refused.items():
        value = fields.get(name)
        if value is None or any(_same(value, other) for other in neutral):
            continue
        allowed = " or ".join(shown(other) for other in (*neutral, None))
        raise RequestError(
            f"'{path}{name}' is not supported by this server: got {shown(value)}; "
            f"leave it out or send {allowed}.",
            param=path + name,
            code="unsupported_parameter",
        )


def _same(value: object, other: object) -> bool:
    """Equality as JSON sees it: 1 is 1.0, but true is no number."""
    return isinstance(value, bool) == isinstance(other, bool) and value == other


_EXPECTED = {
    "int_type": "an integer",
    "float_type": "a number",
    "finite_number": "a finite number",
    "string_type": "a string",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}
_LIMITS = {
    "greater_than_equal": ("ge", "at least"),
    "greater_than": ("gt", "more than"),
    "less_than_equal": ("le", "at most"),
    "less_than": ("lt", "less than"),
}


def _request_error(error: ErrorDetails) -> RequestError:
    """One pydantic error in our words: field, value, limit."""
    kind, ctx = error["type"], error.get("ctx", {})
    path = _path(error["loc"])
    param = path or None
    value = shown(error.get("input"))
    if kind == "missing":
        return RequestError(f"'{path}' is required.", param=param, code="missing_required_parameter")
    if kind == "invalid":
        text = f"'{path}' {ctx['text']}" if ctx["text"].startswith(("has", "must")) else (
            f"'{path}': {ctx['text']}, got {value}"
        )
    elif kind in _EXPECTED:
        text = f"'{path}' must be {_EXPECTED[kind]}, got {value}"
    elif kind in _LIMITS:
        name, words = _LIMITS[kind]
        limit = ctx[name]
        limit = int(limit) if float(limit).is_integer() else limit
        text = f"'{path}' must be {words} {limit}, got {value}"
    elif kind == "literal_error":
        text = f"'{path}' must be {ctx['expected']}, got {value}"
    elif kind in ("string_too_short", "string_too_long"):
        bound = f"at least {ctx['min_length']}" if "min_length" in ctx else f"at most {ctx['max_length']}"
        text = f"'{path}' must have {bound} characters, got {value}"
    elif kind in ("too_short", "too_long"):
        bound = f"at least {ctx['min_length']}" if kind == "too_short" else f"at most {ctx['max_length']}"
        text = f"'{path}' must have {bound} items, got {ctx['actual_length']}"
    else:
        text = f"'{path}': {error['msg']}, got {value}"
    return RequestError(text + ".", param=param, code="invalid_value")


def _path(loc: tuple[int | str, ...]) -> str:
    """("messages", 0, "role") as messages[0].role."""
    path = ""
    for part in loc:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    return path


def shown(value: object, limit: int = 80) -> str:
    """A value as JSON for an error text, cut to `limit` characters."""
    if isinstance(value, str):
        value = value[: limit + 1]
    elif isinstance(value, list | dict) and len(value) > limit:
        return f"a {'list' if isinstance(value, list) else 'object'} of {len(value)} items"
    text = json.dumps(value, default=str)
    return text if len(text) <= limit else text[: limit - 1] + "…"
