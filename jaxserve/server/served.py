"""The model as the front end sees it: its names, its tokenizer and its limits."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from functools import cached_property

import jaxserve
from jaxserve.errors import ModelNotFoundError, RequestError
from jaxserve.grammar.compiler import GrammarCompiler
from jaxserve.server.schema import ChatBody, shown
from jaxserve.server.tooling import Speech, speech_of
from jaxserve.tokenizer.base import Tokenizer
from jaxserve.tokenizer.chat import ChatTemplate
from jaxserve.tokenizer.generation import GenerationDefaults
from jaxserve.tokenizer.infill import Infill, find_infill


@dataclass(frozen=True)
class ServedModel:
    """What requests are parsed against. `names[0]` is the one that answers carry.

    `max_model_len` counts prompt and answer together; ids are in [0, vocab_size).
    """

    names: tuple[str, ...]
    tokenizer: Tokenizer
    max_model_len: int
    vocab_size: int
    created: int  # Unix seconds
    chat_template: ChatTemplate | None = None
    generation: GenerationDefaults = field(default_factory=GenerationDefaults)
    max_logprobs: int = 20  # of the likeliest tokens that a request may ask for at each place
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    max_choices: int = 1024  # of one request: prompts times n, or times best_of

    @property
    def name(self) -> str:
        return self.names[0]

    def resolve(self, name: str | None) -> str:
        """The name to answer with; raises ModelNotFoundError for one that is not served."""
        if name is None:
            return self.name
        if name not in self.names:
            raise ModelNotFoundError(
                f"The model '{name[:200]}' does not exist; this server has {', '.join(self.names)}.",
                param="model",
                code="model_not_found",
            )
        return name

    @cached_property
    def fingerprint(self) -> str:
        """`system_fingerprint`: changes when the software or the model behind the name does."""
        parts = (jaxserve.__version__, self.name, str(self.vocab_size), str(self.max_model_len))
        return "fp_" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:10]

    @cached_property
    def infill(self) -> Infill | None:
        """The tokens for filling in the middle, where the model has them."""
        return find_infill(self.tokenizer)

    @cached_property
    def speeches(self) -> dict[ChatTemplate | None, Speech]:
        """How the model writes calls and reasoning, by the chat template that it is asked with.

        Raises ConfigError, so look at it before serving.
        """
        parsers: dict[ChatTemplate | None, str] = {None: self.tool_call_parser}
        if self.chat_template is not None:
            # What the user says of calls is of the template that is used with tools.
            parsers = dict.fromkeys(self.chat_template.named.values(), "auto")
            parsers[self.chat_template.pick(tools=True)] = self.tool_call_parser
        return {
            template: speech_of(self.tokenizer, template, parser, self.reasoning_parser)
            for template, parser in parsers.items()
        }

    def template_for(self, fields: ChatBody) -> ChatTemplate | None:
        """The chat template of this request; None for a base model. Raises RequestError for another name."""
        if self.chat_template is None:
            return None
        try:
            tools = bool(fields.tools) and fields.tool_choice != "none"
            return self.chat_template.pick(fields.chat_template, tools=tools)
        except KeyError:
            raise RequestError(
                f"'chat_template' is {shown(fields.chat_template)}, which is not supported: a request may "
                f"name one of the model's own templates ({', '.join(self.chat_template.named)[:300]}). "
                "Another one is the server's to choose, with --chat-template.",
                param="chat_template",
                code="unsupported_parameter",
            ) from None

    def speech_for(self, fields: ChatBody) -> Speech:
        """How the model writes in the answer to this request. Raises as `template_for` does."""
        return self.speeches[self.template_for(fields)]

    @cached_property
    def grammars(self) -> GrammarCompiler:
        """Compiles what answers must look like."""
        return GrammarCompiler(self.tokenizer, self.vocab_size)

    @cached_property
    def max_token_bytes(self) -> int:
        """The longest token's length in UTF-8 bytes. Walks the vocabulary once: some 0.1 s."""
        token_bytes = self.tokenizer.token_bytes
        return max((len(token_bytes(i)) for i in range(self.tokenizer.vocab_size)), default=1) or 1
