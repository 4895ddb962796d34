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


REFUSED_CHAT = REFUSED | {
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


def validate_chat(body: object) -> ChatBody:
    """The chat request in `body`; raises RequestError that names the field."""
    fields = object_of(body)
    messages = fields.get("messages")
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            refuse(message, REFUSED_MESSAGE, f"messages[{i}].")
    return validate(ChatBody, fields, REFUSED_CHAT)
