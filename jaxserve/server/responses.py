"""From a body of /v1/responses to the chat that it means. Pure."""

from __future__ import annotations

import secrets
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.server.openai import Generation, parse_chat
from jaxserve.server.schema import shown
from jaxserve.server.schema.body import validate
from jaxserve.server.schema.responses import (
    ITEMS,
    ChosenFunction,
    Content,
    InputCall,
    InputCallOutput,
    InputMessage,
    InputReasoning,
    ResponsesBody,
    validate_responses,
)
from jaxserve.server.schema.sampling import SamplingBody
from jaxserve.server.served import ServedModel
from jaxserve.types import Request

# What a chat calls differently, for errors; the longer names come first.
_NAMES = (
    ("response_format.json_schema", "text.format"),
    ("response_format", "text.format"),
    ("max_completion_tokens", "max_output_tokens"),
    ("messages", "input"),
)
_PASSED_ON = (
    *SamplingBody.model_fields,
    *("model", "stream", "parallel_tool_calls", "priority", "timeout", "cache_salt"),
)


@dataclass(frozen=True, slots=True)
class Asked:
    """One request, understood: what to generate, and the fields that the answer repeats."""

    generation: Generation
    fields: ResponsesBody

    @property
    def id(self) -> str:
        return self.generation.id

    @property
    def requests(self) -> tuple[Request, ...]:
        return self.generation.requests


def parse_responses(body: object, model: ServedModel, arrival_s: float) -> Asked:
    """Raises RequestError, its subclasses included; it names fields of this route."""
    fields = validate_responses(body).completed(model.generation.sampling)
    if fields.stream_options is not None and not fields.stream:
        raise RequestError("'stream_options' is only allowed when 'stream' is true.", param="stream_options")
    chat = {name: getattr(fields, name) for name in _PASSED_ON if name in fields.model_fields_set}
    if "logit_bias" in chat:
        chat["logit_bias"] = {str(token_id): bias for token_id, bias in fields.logit_bias.items()}
    chat["messages"] = _messages(fields)
    chat["max_completion_tokens"] = fields.max_output_tokens
    chat["tools"] = [
        {"type": "function", "function": tool.model_dump(exclude={"type"}, exclude_none=True)}
        for tool in fields.tools
    ]
    if isinstance(fields.tool_choice, ChosenFunction):
        chat["tool_choice"] = {"type": "function", "function": {"name": fields.tool_choice.name}}
    elif fields.tool_choice is not None:
        chat["tool_choice"] = fields.tool_choice
    if fields.text is not None and fields.text.format is not None:
        form = fields.text.format
        chat["response_format"] = {"type": form.type}
        if form.type == "json_schema" and form.schema_ is None:
            raise RequestError(
                "'text.format.schema' is required with the type \"json_schema\".",
                param="text.format.schema",
                code="missing_required_parameter",
            )
        if form.type == "json_schema":
            chat["response_format"]["json_schema"] = form.model_dump(
                exclude={"type"}, exclude_none=True, by_alias=True
            )
    try:
        generation = parse_chat(chat, model, arrival_s)
    except RequestError as error:
        raise renamed(error) from error
    return Asked(replace(generation, id=f"resp_{secrets.token_hex(12)}"), fields)


def renamed(error: RequestError) -> RequestError:
    """The same error in the words of this route."""
    for chat_name, name in _NAMES:
        error.message = error.message.replace(f"'{chat_name}", f"'{name}")
        if error.param is not None and error.param.startswith(chat_name):
            error.param = name + error.param[len(chat_name) :]
    return error


def _messages(fields: ResponsesBody) -> list[dict[str, Any]]:
    """`instructions` and `input` as a chat's messages."""
    messages: list[dict[str, Any]] = []
    if fields.instructions:
        messages.append({"role": "system", "content": fields.instructions})
    if isinstance(fields.input, str):
        return [*messages, {"role": "user", "content": fields.input}]
    thoughts = ""  # that wait for the message or call which they belong to
    for i, value in enumerate(fields.input):
        item = _item(value, f"input[{i}]")
        last = messages[-1] if messages else None
        if isinstance(item, InputReasoning):
            thoughts += "".join(part.text for part in item.content)
        elif isinstance(item, InputMessage):
            messages.append({"role": item.role, "content": _text(item.content)})
        elif isinstance(item, InputCallOutput):
            content = _text(item.output)
            messages.append({"role": "tool", "tool_call_id": item.call_id, "content": content})
        elif isinstance(item, InputCall):
            if last is None or last["role"] != "assistant" or thoughts:
                last = {"role": "assistant", "content": ""}
                messages.append(last)
            function = {"name": item.name, "arguments": item.arguments}
            last.setdefault("tool_calls", []).append(
                {"id": item.call_id, "type": "function", "function": function}
            )
        is_answer = isinstance(item, InputMessage | InputCall) and messages[-1]["role"] == "assistant"
        if thoughts and is_answer:
            messages[-1]["reasoning_content"] = thoughts
            thoughts = ""
    return messages


def _item(value: object, path: str) -> object:
    if not isinstance(value, dict):
        raise RequestError(f"'{path}' must be an object, got {shown(value)}.", param=path)
    kind = value.get("type") or "message"
    model = ITEMS.get(kind) if isinstance(kind, str) else None
    if model is None:
        raise RequestError(
            f"'{path}.type' {shown(kind)} is not supported by this server; send one of {', '.join(ITEMS)}.",
            param=f"{path}.type",
            code="unsupported_parameter",
        )
    try:
        return validate(model, value, {})
    except RequestError as error:
        if error.param is not None:
            error.message = error.message.replace(f"'{error.param}'", f"'{path}.{error.param}'", 1)
            error.param = f"{path}.{error.param}"
        raise


def _text(content: Content) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def echoed(fields: ResponsesBody) -> Iterable[tuple[str, Any]]:
    """The fields of the request that the answer repeats."""
    choice = fields.tool_choice or "auto"
    form = fields.text.format if fields.text is not None else None
    yield "instructions", fields.instructions
    yield "max_output_tokens", fields.max_output_tokens
    yield "metadata", fields.metadata
    yield "parallel_tool_calls", fields.parallel_tool_calls
    yield "temperature", fields.temperature
    yield "top_p", fields.top_p
    yield "tool_choice", choice if isinstance(choice, str) else choice.model_dump()
    yield "tools", [tool.model_dump() for tool in fields.tools]
    shape = {"type": "text"} if form is None else form.model_dump(by_alias=True, exclude_none=True)
    yield "text", {"format": shape}
    yield "user", fields.user
    yield "previous_response_id", None
    yield "store", False
    yield "background", False
    yield "truncation", "disabled"
