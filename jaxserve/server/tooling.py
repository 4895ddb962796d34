"""Tools and reasoning of a chat: what the template is told, what the answer may be, how it is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import ConfigError, RequestError
from jaxserve.grammar.spec import GrammarSpec
from jaxserve.server.schema.chat import ChatBody
from jaxserve.server.schema.errors import shown
from jaxserve.tokenizer.base import Tokenizer
from jaxserve.tokenizer.chat import ChatTemplate
from jaxserve.tools import reasoning
from jaxserve.tools.formats import (
    FORMATS,
    Function,
    ToolFormat,
    after_reasoning,
    choose_format,
    content_or_calls,
    forced_calls,
    free_or_calls,
)
from jaxserve.tools.reasoning import AnswerParser, ThinkParser

REASONING_PARSERS = ("auto", "none", "think")
NUM_TAIL_IDS = 16  # of a prompt: enough to see whether it ends with a tag


@dataclass(frozen=True, slots=True)
class Speech:
    """How this model writes what is not plain text. `special_ids` are those of the texts that matter."""

    tool_format: ToolFormat | None
    thinks: bool
    special_ids: Mapping[str, int]

    def shown_ids(self, *, calls: bool) -> frozenset[int]:
        """Special tokens whose text the parsers have to see."""
        markers = self.tool_format.markers if calls and self.tool_format is not None else ()
        tags = (reasoning.OPEN, reasoning.CLOSE) if self.thinks else ()
        return frozenset(self.special_ids[text] for text in (*markers, *tags) if text in self.special_ids)


@dataclass(frozen=True, slots=True)
class Reading:
    """How to read the answers of one chat."""

    tool_format: ToolFormat | None  # None: no calls
    names: frozenset[str]
    most_calls: int | None
    thinks: bool
    is_open: bool  # the prompt has begun the reasoning

    def parser(self) -> AnswerParser:
        """A new one, for one answer."""
        calls = None if self.tool_format is None else self.tool_format.parser(self.names)
        return AnswerParser(ThinkParser(self.is_open) if self.thinks else None, calls, self.most_calls)

    def new_call_id(self, token: str) -> str:
        """The id of a call, from random hex digits."""
        is_mistral = self.tool_format is not None and self.tool_format.name == "mistral"
        return token[:9] if is_mistral else f"call_{token}"


@dataclass(frozen=True, slots=True)
class Offer:
    """The functions that an answer may call, by what the request chose."""

    functions: tuple[Function, ...] = ()
    is_forced: bool = False
    single: bool = False


def speech_of(
    tokenizer: Tokenizer, template: ChatTemplate | None, tool_call_parser: str, reasoning_parser: str
) -> Speech:
    """Raises ConfigError for parsers that are unknown or can't go with the template."""
    source = "" if template is None else template.source
    if template is not None and not template.takes_tools and tool_call_parser not in ("auto", "hermes"):
        raise ConfigError(
            f"tool_call_parser={tool_call_parser!r}: the chat template knows no tools, so the server "
            'describes them itself, in the format "hermes"; use auto, or give a template by --chat-template'
        )
    if reasoning_parser not in REASONING_PARSERS:
        known = ", ".join(REASONING_PARSERS)
        raise ConfigError(f"reasoning_parser={reasoning_parser!r} must be one of {known}")
    takes_tools = template is not None and template.takes_tools
    tool_format = choose_format(tool_call_parser, source if takes_tools else None)
    texts = {text for one in FORMATS.values() for text in one.markers} | {reasoning.OPEN, reasoning.CLOSE}
    single = {text: ids[0] for text in texts if len(ids := tokenizer.encode(text, parse_special=True)) == 1}
    thinks = reasoning_parser == "think" or (
        reasoning_parser == "auto" and (reasoning.OPEN in source or reasoning.OPEN in single)
    )
    special = {text: token_id for text, token_id in single.items() if tokenizer.is_special(token_id)}
    return Speech(tool_format, thinks, special)


def offer_of(fields: ChatBody, speech: Speech) -> Offer:
    """Raises RequestError for a choice that the tools don't allow."""
    names = [tool.function.name for tool in fields.tools]
    if len(set(names)) < len(names):
        twice = next(name for i, name in enumerate(names) if name in names[:i])
        raise RequestError(
            f"'tools' has two functions called {shown(twice)}; names must differ.", param="tools"
        )
    choice = fields.tool_choice if fields.tool_choice is not None else "auto" if names else "none"
    if choice in ("none", "auto") and not names:
        return Offer()
    if not names:
        raise RequestError(
            f"'tool_choice' {shown(choice)} needs 'tools' to choose from; send some, or leave it out.",
            param="tool_choice",
        )
    if choice == "none":
        return Offer()
    if speech.tool_format is None:
        raise RequestError(
            "'tools' are not supported with this model: its chat template writes calls in a format that no "
            "parser here knows. Leave them out, or start the server with --tool-call-parser and a fitting "
            "--chat-template.",
            param="tools",
            code="unsupported_parameter",
        )
    functions = tuple(
        Function(one.name, one.parameters, one.strict) for one in (tool.function for tool in fields.tools)
    )
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        functions = tuple(one for one in functions if one.name == name)
        if not functions:
            raise RequestError(
                f"'tool_choice' names {shown(name)}, which is not among the tools: {', '.join(names)[:200]}.",
                param="tool_choice",
            )
        return Offer(functions, is_forced=True, single=True)
    return Offer(functions, is_forced=choice == "required", single=not fields.parallel_tool_calls)


def template_tools(fields: ChatBody, offer: Offer) -> list[dict[str, Any]]:
    """The tools as templates take them; none when the model is not to call any."""
    if not offer.functions:
        return []
    return [
        {"type": "function", "function": tool.function.model_dump(exclude={"strict"}, exclude_none=True)}
        for tool in fields.tools
    ]


def reading_of(
    offer: Offer, speech: Speech, tokenizer: Tokenizer, prompt_ids: Sequence[int]
) -> Reading | None:
    """None where the text is nothing but text."""
    if not (offer.functions or speech.thinks):
        return None
    tail = tokenizer.decode(prompt_ids[-NUM_TAIL_IDS:], skip_special=False).rstrip()
    return Reading(
        speech.tool_format if offer.functions else None,
        frozenset(one.name for one in offer.functions),
        1 if offer.single else None,
        speech.thinks,
        speech.thinks and tail.endswith(reasoning.OPEN),
    )


def chat_grammar(
    content: GrammarSpec | None, offer: Offer, speech: Speech, reading: Reading | None
) -> GrammarSpec | None:
    """What the answer must look like, calls and reasoning included; `content` is of one without calls."""
    answer = content
    kind = speech.tool_format
    if offer.functions and kind is not None:
        special, single = speech.special_ids, offer.single
        if offer.is_forced:
            answer = forced_calls(kind, offer.functions, special, single=single, param="tools")
        elif content is not None:
            calls = forced_calls(kind, offer.functions, special, single=single, param="tools")
            answer = content_or_calls(content, calls)
        elif any(one.strict for one in offer.functions):
            answer = free_or_calls(kind, offer.functions, special, single=single, param="tools")
    if answer is not None and reading is not None and reading.thinks:
        answer = after_reasoning(answer, speech.special_ids, is_open=reading.is_open)
    return answer
