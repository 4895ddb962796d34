"""From a request body in OpenAI's words to requests for the engine. Pure: no HTTP, no event loop."""

from __future__ import annotations

import json
import re
import secrets
import time
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn

from jaxserve.errors import RequestError
from jaxserve.grammar.spec import GrammarSpec
from jaxserve.server.prompts import Prompt, chat_prompt, check_id, completion_prompts, max_tokens
from jaxserve.server.schema import (
    ChatBody,
    CompletionBody,
    GenerationBody,
    validate_chat,
    validate_completion,
)
from jaxserve.server.served import ServedModel
from jaxserve.server.shaping import check_min_tokens, shaping_params
from jaxserve.server.structured import answer_spec
from jaxserve.server.tooling import Reading, chat_grammar, offer_of, reading_of, template_tools
from jaxserve.tokenizer.base import Tokenizer
from jaxserve.types import Request, SamplingParams

DEFAULT_COMPLETION_TOKENS = 16
# Below this temperature every draw is the most likely token already, and dividing by it could overflow.
MIN_TEMPERATURE = 1e-5
MIN_TOP_P = 1e-6  # top_p 0 keeps the most likely token, as it does at OpenAI
_MASK = 2**64 - 1
_LONE_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")


@dataclass(frozen=True, slots=True)
class Generation:
    """One HTTP request, understood.

    Each prompt has `num_candidates` requests, one after the other, and the best `n` of them are its choices:
    without `best_of` all of them are, and `requests[i]` answers choice `i`.
    """

    kind: Literal["completion", "chat"]
    id: str
    created: int  # Unix seconds
    model: str
    fingerprint: str
    requests: tuple[Request, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    n: int = 1
    num_candidates: int = 1
    echoes: tuple[str, ...] | None = None  # the text of each prompt, to stand before its answers
    tokenizer: Tokenizer | None = None  # where log-probabilities are to be spelled
    logprobs: int | None = None  # tell of the tokens of the answers, of an echoed prompt's too
    prompt_logprobs: int | None = None  # tell of the prompts' tokens beside the answers
    return_token_ids: bool = False
    grammar: GrammarSpec | None = None  # of all answers; compiled before the requests are submitted
    reading: Reading | None = None  # how to tell calls and reasoning from content; None: all is content


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
    fields = validate_completion(body).completed(model.generation.sampling)
    name = model.resolve(fields.model)
    num_candidates = _num_candidates(fields)
    _check_num_choices(fields, num_candidates, model)
    if fields.max_tokens == 0 and not fields.echo and fields.prompt_logprobs is None:
        raise RequestError(
            "'max_tokens' must be at least 1, got 0; 0 is for 'echo' or 'prompt_logprobs', to have nothing "
            "but the prompt.",
            param="max_tokens",
        )
    default = DEFAULT_COMPLETION_TOKENS if fields.max_tokens is None else fields.max_tokens
    room = max(1, model.max_model_len - max(1, default))
    prompts = completion_prompts(fields, model, room)
    limits = [
        max_tokens(
            model, len(prompt.ids), fields.max_tokens, DEFAULT_COMPLETION_TOKENS, "prompt", "max_tokens"
        )
        for prompt in prompts
    ]
    return replace(
        _generation(
            "completion", "cmpl", name, fields, prompts, limits, num_candidates, model, arrival_s
        ),
        echoes=tuple(prompt.text for prompt in prompts) if fields.echo else None,
        grammar=answer_spec(fields),
    )


def parse_chat(body: object, model: ServedModel, arrival_s: float) -> Generation:
    """A body of /v1/chat/completions. Raises RequestError, its subclasses included."""
    fields = validate_chat(body).completed(model.generation.sampling)
    name = model.resolve(fields.model)
    param = "max_tokens" if fields.max_completion_tokens is None else "max_completion_tokens"
    asked = fields.max_tokens if fields.max_completion_tokens is None else fields.max_completion_tokens
    speech = model.speech_for(fields)
    offer = offer_of(fields, speech)
    room = max(1, model.max_model_len - (asked or 1))
    prompt = chat_prompt(fields, model, room, template_tools(fields, offer))
    default = model.generation.max_tokens or model.max_model_len
    limit = max_tokens(model, len(prompt.ids), asked, default, "messages", param)
    generation = _generation("chat", "chatcmpl", name, fields, [prompt], [limit], fields.n, model, arrival_s)
    reading = reading_of(offer, speech, model.tokenizer, prompt.ids)
    shown_ids = speech.shown_ids(calls=bool(offer.functions))
    requests = generation.requests
    if shown_ids:
        requests = tuple(
            replace(request, params=replace(request.params, shown_ids=shown_ids)) for request in requests
        )
    return replace(
        generation,
        requests=requests,
        grammar=chat_grammar(answer_spec(fields), offer, speech, reading),
        reading=reading,
    )


def _num_candidates(fields: CompletionBody) -> int:
    """How many answers to generate for each prompt, `n` of which are given."""
    if fields.best_of is None or fields.best_of == fields.n:
        return fields.n
    if fields.best_of < fields.n:
        raise RequestError(
            f"'best_of' must be at least 'n', got best_of={fields.best_of} and n={fields.n}.", param="best_of"
        )
    if fields.stream:
        raise RequestError(
            f"'best_of' can't be streamed: which {fields.n} of {fields.best_of} answers are the best is "
            "known at the end. Set 'stream' to false, or 'best_of' to 'n'.",
            param="best_of",
        )
    return fields.best_of


def _check_num_choices(fields: CompletionBody, num_candidates: int, model: ServedModel) -> None:
    num_prompts = len(fields.prompt)
    if num_prompts * num_candidates <= model.max_choices:
        return
    if num_candidates == 1:
        raise RequestError(
            f"'prompt' has {num_prompts} prompts, at most {model.max_choices} fit in one request.",
            param="prompt",
        )
    param = "n" if num_candidates == fields.n else "best_of"
    raise RequestError(
        f"{num_prompts} prompts with '{param}' {num_candidates} make {num_prompts * num_candidates} answers, "
        f"at most {model.max_choices} fit in one request; lower '{param}' or send fewer prompts.",
        param=param,
    )


def _generation(
    kind: Literal["completion", "chat"],
    prefix: str,
    name: str,
    fields: GenerationBody,
    prompts: list[Prompt],
    limits: list[int],
    num_candidates: int,
    model: ServedModel,
    arrival_s: float,
) -> Generation:
    if fields.stream_options is not None and not fields.stream:
        raise RequestError("'stream_options' is only allowed when 'stream' is true.", param="stream_options")
    for i, token_id in enumerate(fields.stop_token_ids):
        check_id(token_id, f"stop_token_ids[{i}]", model)
    options = fields.stream_options
    id = f"{prefix}-{fields.request_id or secrets.token_hex(12)}"
    requests: list[Request] = []
    shaping = shaping_params(fields, model)
    logprobs, prompt_logprobs = _logprobs(fields, model)
    # An echoed prompt is a part of the answer, and its tokens are told of with the answer's.
    scored = logprobs if isinstance(fields, CompletionBody) and fields.echo else None
    scored = prompt_logprobs if scored is None else max(scored, prompt_logprobs or 0)
    for prompt, limit in zip(prompts, limits):
        check_min_tokens(fields.min_tokens, limit, "max_tokens")
        params = replace(
            _sampling(fields, limit, shaping), logprobs=logprobs, prompt_logprobs=scored
        )
        if num_candidates > fields.n and params.logprobs is None:
            params = replace(params, logprobs=0)  # they are ranked by it
        # Those of one prompt share its pages, whatever they are given to draw.
        group = f"{id}-{len(requests)}" if num_candidates > 1 else None
        for i in range(num_candidates):
            requests.append(
                Request(
                    f"{id}-{len(requests)}",
                    prompt.ids,
                    replace(
                        params,
                        seed=sibling_seed(params.seed, i),
                        # A whole answer tells of the prompt by what its first request found.
                        prompt_logprobs=scored if fields.stream else None,
                    )
                    if i else params,
                    arrival_s,
                    priority=fields.priority,
                    timeout_s=fields.timeout,
                    cache_salt=fields.cache_salt,
                    group=group,
                )
            )
    return Generation(
        kind=kind,
        id=id,
        created=int(time.time()),
        model=name,
        fingerprint=model.fingerprint,
        requests=tuple(requests),
        stream=fields.stream,
        include_usage=options is not None and options.include_usage,
        continuous_usage=options is not None and options.continuous_usage_stats,
        n=fields.n,
        num_candidates=num_candidates,
        return_token_ids=fields.return_token_ids,
        tokenizer=model.tokenizer,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )


def _logprobs(fields: GenerationBody, model: ServedModel) -> tuple[int | None, int | None]:
    """(of the answer, of the prompt): how many of the likeliest tokens to tell of at each place, or None."""
    asked: dict[str, int | None] = {"prompt_logprobs": fields.prompt_logprobs}
    if isinstance(fields, ChatBody):
        top = asked["top_logprobs"] = fields.top_logprobs
        if top and not fields.logprobs:
            raise RequestError(
                f"'top_logprobs' is {top}, but 'logprobs' is false: set 'logprobs' to true, or leave "
                "'top_logprobs' out.",
                param="top_logprobs",
            )
        logprobs = (top or 0) if fields.logprobs else None
    else:
        logprobs = asked["logprobs"] = fields.logprobs if isinstance(fields, CompletionBody) else None
    for name, count in asked.items():
        if count is not None and count > model.max_logprobs:
            raise RequestError(
                f"'{name}' must be at most {model.max_logprobs}, got {count}: this server tells of no more "
                "tokens at a place (--max-logprobs). Ask for fewer.",
                param=name,
            )
    if fields.prompt_logprobs is not None and fields.stream:
        raise RequestError(
            "'prompt_logprobs' can't be streamed: leave it out, or set 'stream' to false.",
            param="prompt_logprobs",
        )
    return logprobs, fields.prompt_logprobs


def sibling_seed(seed: int, number: int) -> int:
    """The seed of choice `number`: the request's own for choice 0, and as good as random for the others.

    Source: splitmix64, Steele, Lea and Flood 2014, "Fast splittable pseudorandom number generators".
    """
    if number == 0:
        return seed
    z = (seed + number * 0x9E3779B97F4A7C15) & _MASK
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB & _MASK
    return z ^ (z >> 31)


def _sampling(fields: GenerationBody, max_tokens: int, shaping: dict[str, Any]) -> SamplingParams:
    seed = secrets.randbits(64) if fields.seed is None else fields.seed
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=0.0 if fields.temperature < MIN_TEMPERATURE else fields.temperature,
        top_k=max(fields.top_k, 0),
        top_p=max(fields.top_p, MIN_TOP_P),
        min_p=fields.min_p,
        seed=seed & _MASK,  # a negative seed is the unsigned one of the same bits
        stop=tuple(fields.stop),
        stop_token_ids=frozenset(fields.stop_token_ids),
        ignore_eos=fields.ignore_eos,
        include_stop_str_in_output=fields.include_stop_str_in_output,
        skip_special_tokens=fields.skip_special_tokens,
        **shaping,
    )
