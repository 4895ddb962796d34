"""The fields that change logits, checked against the vocabulary and turned into ids."""

from __future__ import annotations

from typing import Any

from jaxserve.errors import RequestError
from jaxserve.server.prompts import check_id
from jaxserve.server.schema import GenerationBody, shown
from jaxserve.server.served import ServedModel
from jaxserve.tokenizer.base import Tokenizer
from jaxserve.types import MAX_BAD_WORD_TOKENS


def shaping_params(fields: GenerationBody, model: ServedModel) -> dict[str, Any]:
    """Keyword arguments of SamplingParams. Raises RequestError for ids and words that can't be kept to."""
    for token_id in fields.logit_bias:
        check_id(token_id, "logit_bias", model)
    for i, token_id in enumerate(fields.allowed_token_ids or ()):
        check_id(token_id, f"allowed_token_ids[{i}]", model)
    allowed = fields.allowed_token_ids
    return {
        "repetition_penalty": fields.repetition_penalty,
        "presence_penalty": fields.presence_penalty,
        "frequency_penalty": fields.frequency_penalty,
        "logit_bias": tuple(sorted(fields.logit_bias.items())),
        "allowed_token_ids": None if allowed is None else frozenset(allowed),
        "bad_words": _bad_words(fields.bad_words, model.tokenizer),
        "min_tokens": fields.min_tokens,
    }


def check_min_tokens(min_tokens: int, max_tokens: int, param: str) -> None:
    """`param` is the field that says how many tokens there may be, `max_tokens` what it comes to."""
    if min_tokens > max_tokens:
        raise RequestError(
            f"'min_tokens' is {min_tokens}, but '{param}' and the context leave {max_tokens} tokens for an "
            f"answer: lower 'min_tokens' to {max_tokens} or less, or raise '{param}'.",
            param="min_tokens",
        )


def _bad_words(words: list[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The ids of each word as it begins a text and as it stands after a space."""
    found: dict[tuple[int, ...], None] = {}  # in order, each once
    for i, word in enumerate(words):
        bare = word.lstrip(" ")
        for text in (bare, f" {bare}") if bare else (word,):
            ids = tuple(tokenizer.encode(text, parse_special=False))
            if not ids:
                raise RequestError(f"'bad_words[{i}]' has no tokens; leave it out.", param=f"bad_words[{i}]")
            if len(ids) > MAX_BAD_WORD_TOKENS:
                raise RequestError(
                    f"'bad_words[{i}]' is {shown(word, 40)}, which takes {len(ids)} tokens; at most "
                    f"{MAX_BAD_WORD_TOKENS} are allowed. Ban a shorter part of it.",
                    param=f"bad_words[{i}]",
                )
            found[ids] = None
    return tuple(found)
