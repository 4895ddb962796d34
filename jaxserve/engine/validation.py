"""Which requests an engine of this size can serve."""

from __future__ import annotations

from math import isfinite

from jaxserve.engine.config import EngineConfig
from jaxserve.errors import ContextLengthError, RequestError
from jaxserve.types import (
    MAX_BAD_WORD_SEQUENCES,
    MAX_BAD_WORD_TOKENS,
    MAX_LOGIT_BIAS,
    MAX_MASKED_END_IDS,
    Request,
    SamplingParams,
)


def check_request(
    request: Request, config: EngineConfig, vocab_size: int | None, eos_ids: frozenset[int] = frozenset()
) -> None:
    """Raise RequestError or ContextLengthError unless the request fits; cost is one look at each id."""
    prompt_ids, params = request.prompt_ids, request.params
    limit = f"this model's maximum context length is {config.max_model_len} tokens"
    if not prompt_ids:
        raise RequestError(f"the prompt is empty: it needs at least one token; {limit}", param="prompt")
    if params.max_tokens < 0:
        raise RequestError(f"max_tokens={params.max_tokens} must be at least 0", param="max_tokens")
    if request.embeds and params.max_tokens:
        raise RequestError(
            f"max_tokens={params.max_tokens} must be 0 with embeds: the answer is a vector",
            param="max_tokens",
        )
    if len(prompt_ids) >= config.max_model_len + (params.max_tokens == 0):
        raise ContextLengthError(
            f"{limit}, but the prompt has {len(prompt_ids)} and at least one must be left for the output; "
            "shorten the prompt",
            param="prompt",
            code="context_length_exceeded",
        )
    if len(prompt_ids) + params.max_tokens > config.max_model_len:
        raise ContextLengthError(
            f"{limit}, but {len(prompt_ids) + params.max_tokens} were asked for: {len(prompt_ids)} in the "
            f"prompt and {params.max_tokens} for the output; shorten the prompt or lower max_tokens to "
            f"{config.max_model_len - len(prompt_ids)}",
            param="max_tokens",
            code="context_length_exceeded",
        )
    if request.priority and config.scheduling_policy != "priority":
        raise RequestError(
            f"priority={request.priority} has no effect: this server takes requests in the order they come "
            "(--scheduling-policy fcfs); leave it out",
            param="priority",
            code="unsupported_parameter",
        )
    _check_logprobs("logprobs", params.logprobs, config)
    _check_logprobs("prompt_logprobs", params.prompt_logprobs, config)
    if "" in params.stop:
        raise RequestError("stop must not hold an empty string: it would end every text", param="stop")
    if params.is_shaped:
        _check_shaping(params, eos_ids)
    if vocab_size is not None:
        _check_ids("prompt", prompt_ids, vocab_size)
        _check_ids("logit_bias", frozenset(token_id for token_id, _ in params.logit_bias), vocab_size)
        _check_ids("allowed_token_ids", params.allowed_token_ids or frozenset(), vocab_size)
        _check_ids("bad_words", frozenset(i for word in params.bad_words for i in word), vocab_size)
        _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)


def _check_shaping(params: SamplingParams, eos_ids: frozenset[int]) -> None:
    """What the device keeps of a slot has fixed sizes, and some token must be left to pick."""
    end_ids = eos_ids | params.stop_token_ids if params.min_tokens else frozenset()
    for field, count, limit in (
        ("logit_bias", len(params.logit_bias), MAX_LOGIT_BIAS),
        ("bad_words", len(params.bad_words), MAX_BAD_WORD_SEQUENCES),
        ("stop_token_ids with min_tokens, end-of-sequence ids included,", len(end_ids), MAX_MASKED_END_IDS),
    ):
        if count > limit:
            raise RequestError(
                f"{field} has {count} entries, at most {limit} are possible", param=field.split(" ")[0]
            )
    for word in params.bad_words:
        if not 0 < len(word) <= MAX_BAD_WORD_TOKENS:
            raise RequestError(
                f"bad_words has one of {len(word)} tokens, possible are 1 to {MAX_BAD_WORD_TOKENS}",
                param="bad_words",
            )
    for field in ("repetition_penalty", "frequency_penalty", "presence_penalty"):
        value = getattr(params, field)
        if not isfinite(value) or (field == "repetition_penalty" and value <= 0):
            above = " above 0" if field == "repetition_penalty" else ""
            raise RequestError(f"{field}={value} must be a finite number{above}", param=field)
    if len({token_id for token_id, _ in params.logit_bias}) < len(params.logit_bias):
        raise RequestError("logit_bias names a token id twice", param="logit_bias")
    if not 0 <= params.min_tokens <= params.max_tokens:
        raise RequestError(
            f"min_tokens={params.min_tokens} must be from 0 to max_tokens={params.max_tokens}",
            param="min_tokens",
        )
    if params.allowed_token_ids is not None:
        forbidden = end_ids | {word[0] for word in params.bad_words if len(word) == 1}
        if all(token_id in forbidden for token_id in params.allowed_token_ids):
            raise RequestError(
                f"allowed_token_ids has {len(params.allowed_token_ids)} ids, none of which bad_words and "
                "min_tokens leave to be picked; allow others",
                param="allowed_token_ids",
            )


def _check_logprobs(field: str, count: int | None, config: EngineConfig) -> None:
    if count is not None and not 0 <= count <= config.max_logprobs:
        raise RequestError(
            f"{field}={count} must be from 0 to {config.max_logprobs}, the most likely tokens that this "
            "server tells of at a place; ask for fewer, or raise --max-logprobs",
            param=field,
        )


def _check_ids(field: str, ids: tuple[int, ...] | frozenset[int], vocab_size: int) -> None:
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(i for i in ids if not 0 <= i < vocab_size)
        raise RequestError(f"{field}: token id {wrong} is outside [0, {vocab_size})", param=field)
