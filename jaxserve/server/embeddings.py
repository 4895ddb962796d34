"""From a body of /v1/embeddings to requests for the engine, and from what they give to the answer. Pure."""

from __future__ import annotations

import json
import secrets
from base64 import b64encode
from dataclasses import dataclass
from typing import Literal

import numpy as np

from jaxserve.errors import ContextLengthError, RequestError
from jaxserve.server.prompts import completion_prompts
from jaxserve.server.schema import validate_completion
from jaxserve.server.schema.embeddings import EmbeddingsBody, validate_embeddings
from jaxserve.server.served import ServedModel
from jaxserve.types import Event, Request, SamplingParams

PROMPT_ALONE = SamplingParams(0, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Embeddings:
    """One HTTP request, understood: `requests[i]` embeds text `i` of `input`."""

    id: str
    model: str
    encoding_format: Literal["float", "base64"]
    requests: tuple[Request, ...]


def parse_embeddings(body: object, model: ServedModel, arrival_s: float) -> Embeddings:
    """Raises RequestError, its subclasses included."""
    fields = validate_embeddings(body)
    name = model.resolve(fields.model)
    if len(fields.input) > model.max_choices:
        raise RequestError(
            f"'input' has {len(fields.input)} texts, at most {model.max_choices} fit in one request; send "
            "them in several.",
            param="input",
        )
    id = f"embd-{secrets.token_hex(12)}"
    requests = tuple(
        Request(
            f"{id}-{i}",
            ids,
            PROMPT_ALONE,
            arrival_s,
            priority=fields.priority,
            timeout_s=fields.timeout,
            cache_salt=fields.cache_salt,
            embeds=True,
        )
        for i, ids in enumerate(_prompts(fields, model))
    )
    return Embeddings(id, name, fields.encoding_format, requests)


def _prompts(fields: EmbeddingsBody, model: ServedModel) -> list[tuple[int, ...]]:
    """The tokens of each text: those that a completion's prompt would have."""
    limit = model.max_model_len
    completion = validate_completion({
        "prompt": fields.input,
        "truncate_prompt_tokens": fields.truncate_prompt_tokens,
        "add_special_tokens": fields.add_special_tokens,
    })
    try:
        prompts = completion_prompts(completion, model, limit)
    except ContextLengthError:  # seen before it is split
        size = max(len(text) for text in fields.input if isinstance(text, str))
        raise _too_long("input", f"a text of {size} characters, which make more than that", limit) from None
    except RequestError as error:
        if error.param == "prompt":
            error.param, error.message = "input", error.message.replace("'prompt'", "'input'")
        raise
    for i, prompt in enumerate(prompts):
        if len(prompt.ids) > limit:
            path = "input" if len(prompts) == 1 else f"input[{i}]"
            raise _too_long(path, f"{len(prompt.ids)} tokens", limit)
    return [prompt.ids for prompt in prompts]


def _too_long(path: str, size: str, limit: int) -> ContextLengthError:
    return ContextLengthError(
        f"This model's maximum context length is {limit} tokens. However, '{path}' has {size}. Shorten it, "
        "or set 'truncate_prompt_tokens' to -1 to embed the last tokens that fit.",
        param="input",
        code="context_length_exceeded",
    )


class EmbeddingsRenderer:
    """The answer, put together as the vectors come: to spell a thousand at once would hold up streams."""

    def __init__(self, asked: Embeddings):
        self._asked = asked
        self._texts = [""] * len(asked.requests)
        self._num_cached = 0

    def collect(self, index: int, event: Event) -> None:
        assert event.embedding is not None, f"{event.request_id} ended without a vector"
        embedding = _spelled(event.embedding, self._asked.encoding_format)
        self._texts[index] = f'{{"object":"embedding","index":{index},"embedding":{embedding}}}'
        self._num_cached += event.num_cached_tokens

    def response(self) -> str:
        num_tokens = sum(len(request.prompt_ids) for request in self._asked.requests)
        usage = {
            "prompt_tokens": num_tokens,
            "total_tokens": num_tokens,
            "prompt_tokens_details": {"cached_tokens": self._num_cached},
        }
        rest = json.dumps({"model": self._asked.model, "usage": usage})[1:]
        return f'{{"object":"list","data":[{",".join(self._texts)}],{rest}'


def _spelled(vector: np.ndarray, encoding_format: Literal["float", "base64"]) -> str:
    """As JSON: numbers, or a string of the base64 of little-endian float32."""
    if encoding_format == "float":
        return json.dumps(vector.tolist())
    return f'"{b64encode(vector.astype("<f4").tobytes()).decode()}"'
