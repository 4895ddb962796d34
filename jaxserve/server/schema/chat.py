"""The body of /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from jaxserve.server.schema.body import Body, object_of, refuse, validate
from jaxserve.server.schema.fields import Content, Int
from jaxserve.server.schema.generation import REFUSED, GenerationBody
from jaxserve.server.schema.tools import MessageCall, ToolChoice, Tools


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content = ""
    name: str | None = None
    tool_calls: Annotated[list[MessageCall], FailFast()] = []  # of the assistant
    tool_call_id: str | None = None  # of a tool: which call this is the result of
    reasoning_content: str | None = None  # of the assistant, for templates that want it back


class ChatBody(GenerationBody):
    messages: Annotated[list[Message], Field(min_length=1), FailFast()]
    max_completion_tokens: Annotated[Int, Field(ge=1, lt=2**31)] | None = None  # beats max_tokens
    logprobs: bool = False
    top_logprobs: Annotated[Int, Field(ge=0)] | None = None  # with logprobs: how many of the likeliest
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None  # the name of one of the model's own
    chat_template_kwargs: dict[str, Any] = {}
    tools: Tools = []
    tool_choice: ToolChoice | None = None  # absent: "auto" with tools, "none" without
    parallel_tool_calls: bool = True  # without tools it means nothing


REFUSED_CHAT = REFUSED | {
    "functions": ([],),
    "function_call": ("none", "auto"),
    "best_of": (1,),
    "suffix": ("",),
    "documents": ([],),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "include_reasoning": (True,),
    "echo": (False,),
}
REFUSED_MESSAGE: dict[str, tuple[Any, ...]] = {"function_call": (), "audio": ()}


def validate_chat(body: object) -> ChatBody:
    """The chat request in `body`; raises RequestError that names the field."""
    fields = object_of(body)
    messages = fields.get("messages")
    for i, message in enumerate(messages if isinstance(messages, list) else ()):
        if isinstance(message, dict):
            refuse(message, REFUSED_MESSAGE, f"messages[{i}].")
    return validate(ChatBody, fields, REFUSED_CHAT)
