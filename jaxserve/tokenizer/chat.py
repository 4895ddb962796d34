"""Chat messages to the text, and the ids, that a model was trained to continue."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from jinja2.exceptions import SecurityError, TemplateError, TemplateSyntaxError

from jaxserve.errors import RequestError, TokenizerError
from jaxserve.tokenizer import sandbox
from jaxserve.tokenizer.base import Tokenizer
from jaxserve.tokenizer.template_files import DEFAULT, TOOL_USE

_OURS = frozenset(("messages", "add_generation_prompt", "bos_token", "eos_token"))


class ChatTemplate:
    """A model's jinja2 chat template, compiled once in a sandbox. Safe to use from several threads.

    `others` are the sources of further templates of the model, by name. Raises TokenizerError if a template
    has a syntax error or wants what a template has no need for.
    """

    def __init__(
        self,
        source: str,
        *,
        bos_token: str,
        eos_token: str,
        others: Mapping[str, str] | None = None,
        name: str = DEFAULT,
    ):
        self.source = source
        self.name = name
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        what = "chat template" if name == DEFAULT else f"chat template {name!r}"
        try:
            self._template = sandbox.compile_template(source)
        except TemplateSyntaxError as error:
            raise TokenizerError(f"{what}, line {error.lineno}: {error.message}") from error
        except (TemplateError, RecursionError) as error:
            raise TokenizerError(f"{what}: {error}") from error
        self.named: dict[str, ChatTemplate] = {name: self} | {
            other: ChatTemplate(text, bos_token=bos_token, eos_token=eos_token, name=other)
            for other, text in (others or {}).items()
        }

    def pick(self, name: str | None = None, *, tools: bool) -> ChatTemplate:
        """The one called `name`; without a name, `tool_use` where there are tools to tell of, else this one.

        Raises KeyError for a name that no template has.
        """
        if name is None:
            name = TOOL_USE if tools and TOOL_USE in self.named else self.name
        return self.named[name]

    @cached_property
    def variables(self) -> frozenset[str]:
        """The names that a client may set: what the template reads and a request has no field for."""
        return sandbox.variables_of(self.source) - _OURS - {"tools"}

    @cached_property
    def takes_tools(self) -> bool:
        """Whether the template reads `tools`; one that doesn't would drop them silently."""
        return "tools" in sandbox.variables_of(self.source)

    def render(
        self, messages: list[dict[str, Any]], /, *, add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """The conversation as text; with the generation prompt it ends where the model is to speak.

        `kwargs` are further variables (`tools`, `documents`, a model's own switches). Raises RequestError
        if the template refuses the messages or can't handle their form, TokenizerError if the template
        does what the sandbox forbids or costs too much.
        """
        if taken := _OURS & kwargs.keys():
            raise RequestError(
                f"chat template variable {min(taken)!r} is not the client's to set",
                param="chat_template_kwargs",
            )
        variables = {
            "tools": None,
            "documents": None,
            **kwargs,
            **self._tokens,
            "messages": messages,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return sandbox.render(self._template, variables)
        except sandbox.RaisedByTemplate as error:
            raise RequestError(
                f"the chat template refuses the messages: {error}", param="messages"
            ) from error
        except SecurityError as error:
            raise TokenizerError(f"the chat template is refused: {error}") from error
        except (RecursionError, MemoryError) as error:
            raise TokenizerError(f"the chat template is refused: {type(error).__name__}") from error
        except Exception as error:  # whatever Python raises when an operation meets a value of another type
            raise RequestError(
                f"the chat template can't render these messages: {error}", param="messages"
            ) from error


def chat_template(
    tokenizer: Tokenizer, source: str, others: Mapping[str, str] | None = None
) -> ChatTemplate:
    """The template with this tokenizer's BOS and EOS texts; empty for a token the model doesn't have."""
    return ChatTemplate(
        source,
        others=others,
        bos_token="" if tokenizer.bos_id is None else tokenizer.token_text(tokenizer.bos_id),
        eos_token="" if tokenizer.eos_id is None else tokenizer.token_text(tokenizer.eos_id),
    )


def encode_chat(
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    messages: Sequence[dict[str, Any]],
    /,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_bos: bool = True,
    **kwargs: Any,
) -> list[int]:
    """Ids of the rendered conversation, with BOS once if the model wants it, whoever put it there.

    Without `add_bos` only the template puts it there. With `continue_final_message` the conversation ends
    right after the text of the last message, whatever the template puts behind it. Raises what
    `ChatTemplate.render` raises, and RequestError for a model without a template.
    """
    if template is None:
        raise RequestError(
            "this model has no chat template: it is a base model. Use /v1/completions, or start the server "
            "with --chat-template FILE",
            param="messages",
            code="no_chat_template",
        )
    if continue_final_message:
        text = _render_open(template, list(messages), **kwargs)
    else:
        text = template.render(list(messages), add_generation_prompt=add_generation_prompt, **kwargs)
    ids = tokenizer.encode(text, parse_special=True)
    if add_bos and tokenizer.add_bos and tokenizer.bos_id is not None and ids[:1] != [tokenizer.bos_id]:
        ids.insert(0, tokenizer.bos_id)
    return ids


def _render_open(template: ChatTemplate, messages: list[dict[str, Any]], **kwargs: Any) -> str:
    """The conversation up to the end of the last message's text.

    A mark behind that text shows where it ends: looking for the text itself would miss one that the template
    trims, and find one that the template says again.
    """
    mark = f"end{secrets.token_hex(16)}"
    last = {**messages[-1], "content": f"{messages[-1]['content']}{mark}"}
    text = template.render([*messages[:-1], last], add_generation_prompt=False, **kwargs)
    end = text.rfind(mark)
    if end < 0:
        raise RequestError(
            "'continue_final_message' is not possible: this model's chat template does not show the final "
            "message's text",
            param="continue_final_message",
        )
    return text[:end].replace(mark, "")
