"""The bodies of /tokenize and /detokenize."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import FailFast, Field

from jaxserve.errors import RequestError
from jaxserve.server.schema.body import Body, object_of, validate
from jaxserve.server.schema.chat import Message
from jaxserve.server.schema.fields import TokenId
from jaxserve.server.schema.tools import Tools

CHAT_FIELDS = frozenset(
    ("add_generation_prompt", "continue_final_message", "chat_template", "chat_template_kwargs", "tools")
)


class TokenizeBody(Body):
    """A text or a chat: one of `prompt` and `messages`."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Field(min_length=1)] | None = None
    add_special_tokens: bool = True
    return_token_strs: bool = False
    # With `messages`, as in a chat.
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = {}
    tools: Tools = []


class DetokenizeBody(Body):
    model: str | None = None
    tokens: Annotated[list[TokenId], FailFast()]


def validate_tokenize(body: object) -> TokenizeBody:
    """Raises RequestError that names the field."""
    fields = validate(TokenizeBody, object_of(body), {})
    if (fields.prompt is None) == (fields.messages is None):
        raise RequestError(
            "Send either 'prompt' or 'messages'"
            + ("." if fields.prompt is None else ", not both."),
            param="prompt",
        )
    if fields.prompt is not None and (extra := sorted(CHAT_FIELDS & fields.model_fields_set)):
        raise RequestError(
            f"'{extra[0]}' goes with 'messages', not with 'prompt'; leave it out.", param=extra[0]
        )
    return fields


def validate_detokenize(body: object) -> DetokenizeBody:
    """Raises RequestError that names the field."""
    return validate(DetokenizeBody, object_of(body), {})
