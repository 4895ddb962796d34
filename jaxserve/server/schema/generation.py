"""Fields that completions and chat share."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import FailFast, Field

from jaxserve.server.schema.body import Body
from jaxserve.server.schema.fields import Int, StopStrings, TokenId
from jaxserve.server.schema.sampling import SamplingBody

MAX_STOP_TOKEN_IDS = 64
MAX_SALT_CHARS = 256
MAX_PRIORITY = 1000


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False


class GenerationBody(SamplingBody):
    """Beside how to sample: which model, when to stop, how to answer."""

    model: str | None = None  # absent: the model that is served
    max_tokens: Annotated[Int, Field(ge=1, lt=2**31)] | None = None
    stop: StopStrings = []
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS), FailFast()] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    stream: bool = False
    stream_options: StreamOptions | None = None
    priority: Annotated[Int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = None  # seconds from arrival to the last token
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    user: str | None = None  # the client's own label of its end user; nothing depends on it


# Known fields that are not honoured, and the values that ask for nothing; null is always one of them.
REFUSED: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "prompt_logprobs": (False,),
    "return_token_ids": (False,),
    "truncate_prompt_tokens": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": ({},),
    "request_id": (),
    "use_beam_search": (False,),
}
