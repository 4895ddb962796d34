"""Which requests an engine of this size can serve."""

from __future__ import annotations

from jaxserve.engine.config import EngineConfig
from jaxserve.errors import ContextLengthError, RequestError
from jaxserve.types import Request


def check_request(request: Request, config: EngineConfig, vocab_size: int | None) -> None:
    """Raise RequestError or ContextLengthError unless the request fits; cost is one look at each id."""
    prompt_ids, params = request.prompt_ids, request.params
    limit = f"this model's maximum context length is {config.max_model_len} tokens"
    if not prompt_ids:
        raise RequestError(f"the prompt is empty: it needs at least one token; {limit}", param="prompt")
    if params.max_tokens < 0:
        raise RequestError(f"max_tokens={params.max_tokens} must be at least 0", param="max_tokens")
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
    if vocab_size is not None:
        _check_ids("prompt", prompt_ids, vocab_size)
        _check_ids("stop_token_ids", params.stop_token_ids, vocab_size)


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
