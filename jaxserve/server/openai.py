"""From a request body in OpenAI's words to requests for the engine. Pure: no HTTP, no event loop."""

from __future__ import annotations

import json
import re
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from jaxserve.errors import ContextLengthError, RequestError, TokenizerError
from jaxserve.server.schema import (
    GenerationBody,
    Message,
    shown,
    validate_chat,
    validate_completion,
)
from jaxserve.server.served import ServedModel
from jaxserve.tokenizer.chat import encode_chat
from jaxserve.types import Request, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
# Below this temperature every draw is the most likely token already, and dividing by it could overflow.
MIN_TEMPERATURE = 1e-5
MIN_TOP_P = 1e-6  # top_p 0 keeps the most likely token, as it does at OpenAI
_LONE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class Generation:
    """One HTTP request, understood. `requests[i]` answers choice `i`."""

    kind: Literal["completion", "chat"]
    id: str
    created: int  # Unix seconds
    model: str
    fingerprint: str
    requests: tuple[Request, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool


def loads(raw: bytes) -> Any:
    """The JSON in `raw`; raises RequestError for anything that RFC 8259 does not allow."""
    try:
        body = json.loads(raw, parse_constant=_no_constant)
        if _LONE_SURROGATE.search(raw):  # half of a pair is no character and could not be tokenised
            json.dumps(body, ensure_ascii=False).encode()
    except UnicodeError:
        raise RequestError("The request body is not valid Unicode.", code="invalid_json") from None
    except ValueError as exc:
        reason = str(exc).partition("\n")[0]
        raise RequestError(f"The request body is not valid JSON: {reason}.", code="invalid_json") from None
    except RecursionError:
        raise RequestError("The request body is nested too deeply.", code="invalid_json") from None
    return body


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number JSON knows")


def parse_completion(body: object, model: ServedModel, arrival_s: float) -> Generation:
    """A body of /v1/completions. Raises RequestError, its subclasses included."""
    fields = validate_completion(body)
    name = model.resolve(fields.model)
    if len(fields.prompt) > model.max_prompts:
        raise RequestError(
            f"'prompt' has {len(fields.prompt)} prompts, at most {model.max_prompts} fit in one request.",
            param="prompt",
        )
    prompts = [_prompt_ids(prompt, model) for prompt in fields.prompt]

    def limit(prompt_len: int) -> int:
        return _max_tokens(
            model, prompt_len, fields.max_tokens, DEFAULT_COMPLETION_TOKENS, "prompt", "max_tokens"
        )

    return _generation("completion", f"cmpl-{secrets.token_hex(12)}", name, fields, prompts, limit, model,
                       arrival_s)


def parse_chat(body: object, model: ServedModel, arrival_s: float) -> Generation:
    """A body of /v1/chat/completions. Raises RequestError, its subclasses included."""
    fields = validate_chat(body)
    name = model.resolve(fields.model)
    ids = _chat_ids(fields.messages, fields.add_generation_prompt, model)
    param = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    asked = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens

    def limit(prompt_len: int) -> int:
        return _max_tokens(model, prompt_len, asked, model.max_model_len, "messages", param)

    return _generation("chat", f"chatcmpl-{secrets.token_hex(12)}", name, fields, [ids], limit, model,
                       arrival_s)


def _generation(
    kind: Literal["completion", "chat"],
    id: str,
    name: str,
    fields: GenerationBody,
    prompts: list[list[int]],
    limit: Callable[[int], int],
    model: ServedModel,
    arrival_s: float,
) -> Generation:
    if fields.stream_options is not None and not fields.stream:
        raise RequestError("'stream_options' is only allowed when 'stream' is true.", param="stream_options")
    for i, token_id in enumerate(fields.stop_token_ids):
        _check_id(token_id, f"stop_token_ids[{i}]", model)
    options = fields.stream_options
    return Generation(
        kind=kind,
        id=id,
        created=int(time.time()),
        model=name,
        fingerprint=model.fingerprint,
        requests=tuple(
            Request(
                f"{id}-{i}",
                tuple(ids),
                _sampling(fields, limit(len(ids))),
                arrival_s,
                priority=fields.priority,
                timeout_s=fields.timeout,
                cache_salt=fields.cache_salt,
            )
            for i, ids in enumerate(prompts)
        ),
        stream=fields.stream,
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and options.continuous_usage_stats,
    )


def _sampling(fields: GenerationBody, max_tokens: int) -> SamplingParams:
    seed = secrets.randbits(64) if fields.seed is None else fields.seed
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if fields.temperature < MIN_TEMPERATURE else fields.temperature,
        top_k=max(fields.top_k, 0),
        top_p=max(fields.top_p, MIN_TOP_P),
        min_p=fields.min_p,
        seed=seed & (2**64 - 1),  # a negative seed is the unsigned one of the same bits
        stop=tuple(fields.stop),
        stop_token_ids=frozenset(fields.stop_token_ids),
        ignore_eos=fields.ignore_eos,
        include_stop_str_in_output=fields.include_stop_str_in_output,
        skip_special_tokens=fields.skip_special_tokens,
    )


def _prompt_ids(prompt: str | list[int], model: ServedModel) -> list[int]:
    if not prompt:
        raise RequestError("'prompt' must not be empty: send some text or token ids.", param="prompt")
    if isinstance(prompt, list):
        for token_id in prompt:
            _check_id(token_id, "prompt", model)
        return prompt
    _check_text_fits([prompt], "prompt", model)
    tokenizer = model.tokenizer
    ids = tokenizer.encode(prompt)
    bos = tokenizer.bos_id
    if tokenizer.add_bos and bos is not None and ids[:1] != [bos]:  # the text may already spell it
        ids = [bos, *ids]
    return ids


def _chat_ids(messages: list[Message], add_generation_prompt: bool, model: ServedModel) -> list[int]:
    _check_text_fits([message.content for message in messages], "messages", model)
    dicts: list[dict[str, Any]] = []
    for message in messages:
        # "developer" is OpenAI's newer name of "system"; templates know the older one.
        role = "system" if message.role == "developer" else message.role
        dicts.append({"role": role, "content": message.content})
        if message.name is not None:
            dicts[-1]["name"] = message.name
    try:
        return encode_chat(
            model.tokenizer, model.chat_template, dicts, add_generation_prompt=add_generation_prompt
        )
    except TokenizerError as exc:  # the template's own raise_exception, for roles it does not take
        raise RequestError(
            f"'messages' can't be rendered by the chat template: {exc}", param="messages"
        ) from exc


def _check_id(token_id: int, param: str, model: ServedModel) -> None:
    if not 0 <= token_id < model.vocab_size:
        raise RequestError(
            f"'{param}' has the token id {shown(token_id)}, outside of the vocabulary "
            f"[0, {model.vocab_size}).",
            param=param,
        )


def _check_text_fits(texts: list[str], param: str, model: ServedModel) -> None:
    """Refuse what can't fit, however it is split, before seconds are spent on splitting it."""
    if sum(map(len, texts)) <= 8 * model.max_model_len:
        return
    at_least = sum(len(text.encode()) for text in texts) // model.max_token_bytes
    if at_least >= model.max_model_len:
        raise _too_long(model, f"at least {at_least}", param)


def _max_tokens(
    model: ServedModel, prompt_len: int, asked: int | None, default: int, prompt: str, param: str
) -> int:
    """How many tokens to generate: what was asked if it fits, else what is left of the default."""
    left = model.max_model_len - prompt_len
    if prompt_len == 0:
        raise RequestError(f"'{prompt}' must not be empty: it has no tokens.", param=prompt)
    if left < 1:
        raise _too_long(model, str(prompt_len), prompt)
    if asked is None:
        return min(default, left)
    if asked > left:
        raise ContextLengthError(
            f"This model's maximum context length is {model.max_model_len} tokens. However, you requested "
            f"{prompt_len + asked} tokens ({prompt_len} in '{prompt}', {asked} in '{param}'). "
            f"Shorten '{prompt}', or set '{param}' to {left} or less.",
            param=param,
            code="context_length_exceeded",
        )
    return asked


def _too_long(model: ServedModel, prompt_len: str, param: str) -> ContextLengthError:
    return ContextLengthError(
        f"This model's maximum context length is {model.max_model_len} tokens. However, '{param}' has "
        f"{prompt_len} tokens, and an answer needs room for one more. Shorten '{param}'.",
        param=param,
        code="context_length_exceeded",
    )
