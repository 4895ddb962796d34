"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from jaxserve.server.schema.body import Body, object_of, refuse, validate
from jaxserve.server.schema.fields import Content, Int
from jaxserve.server.schema.generation import REFUSED, GenerationBody


class Message(Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: Content = ""
    name: str | None = None


class ChatBody(GenerationBody):
    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    max_completion_tokens: Annotated[Int, Field(ge=1, lt=2**31)] | None = None  # beats max_tokens
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}


REFUSED_CHAT = REFUSED | {
    "logprobs": (False,),
    "top_logprobs": (0,),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "parallel_tool_calls": (False, True),  # without tools both mean nothing
    "functions": ([],),
    "function_call": ("none", "auto"),
    "best_of": (1,),
    "suffix": ("",),
    "chat_template": (),  # it would be the client's code
    "documents": ([],),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "echo": (False,),
}
REFUSED_MESSAGE: dict[str, tuple[Any, ...]] = {"tool_calls": ([],), "function_call": (), "audio": ()}


def validate_chat(body: object) -> ChatBody:
    """The chat request in `body`; raises RequestError that names the field."""
    fields = object_of(body)
    messages = fields.get("messages")
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            refuse(message, REFUSED_MESSAGE, f"messages[{i}].")
    return validate(ChatBody, fields, REFUSED_CHAT)
