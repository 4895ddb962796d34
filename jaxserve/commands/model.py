"""From what the launcher loaded to what requests are parsed against."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jaxserve.server.served import ServedModel

if TYPE_CHECKING:
    from jaxserve.launch import LoadedEngine


def served_model(
    loaded: LoadedEngine,
    names: Sequence[str] | None = None,
    *,
    tool_call_parser: str = "auto",
    reasoning_parser: str = "auto",
) -> ServedModel:
    """The loaded model under its own name, or under `names`; ConfigError for parsers that don't fit."""
    model = ServedModel(
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
        names=tuple(names or (loaded.model_name,)),
        tokenizer=loaded.tokenizer,
        chat_template=loaded.chat_template,
        generation=loaded.generation,
        max_model_len=loaded.config.max_model_len,
        vocab_size=loaded.vocab_size,
        max_logprobs=loaded.config.max_logprobs,
        created=int(time.time()),
    )
    assert model.speeches  # a parser that doesn't fit shows here, not with the first request
    return model
