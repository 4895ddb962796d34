"""Fields that completions and chat share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import FailFast, Field

from jaxserve.server.schema.body import Body
from jaxserve.server.schema.fields import Int, StopStrings, TokenId
from jaxserve.server.schema.sampling import SamplingBody
from jaxserve.server.schema.structured import StructuredBody

MAX_STOP_TOKEN_IDS = 64
MAX_SALT_CHARS = 256
MAX_PRIORITY = 1000
MAX_CHOICES = 128  # of one prompt
MAX_LABELS = 16  # pairs of `metadata`


REQUEST_ID = r"^[A-Za-z0-9._:-]{1,128}$"
Label = Annotated[str, Field(max_length=64)]


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: Literal[False] = False  # padding against traffic analysis: not there


class GenerationBody(SamplingBody, StructuredBody):
    """Beside how to sample: which model, when to stop, how to answer."""

    model: str | None = None  # absent: the model that is served
    max_tokens: Annotated[Int, Field(ge=1, lt=2**31)] | None = None
    min_tokens: Annotated[Int, Field(ge=0, lt=2**31)] = 0
    n: Annotated[Int, Field(ge=1, le=MAX_CHOICES)] = 1
    truncate_prompt_tokens: Annotated[Int, Field(ge=-1, lt=2**31)] | None = None
    add_special_tokens: bool = True
    return_token_ids: bool = False
    prompt_logprobs: Annotated[Int, Field(ge=0)] | None = None  # how many of the likeliest at each place
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
    request_id: Annotated[str, Field(pattern=REQUEST_ID)] | None = None  # a part of the answer's id
    # Labels and hints of the client's own. Nothing depends on them here, and nothing should.
    user: str | None = None
    safety_identifier: str | None = None
    metadata: Annotated[dict[Label, Annotated[str, Field(max_length=512)]], Field(max_length=MAX_LABELS)] = {}
    prompt_cache_key: str | None = None  # prefixes are found by their tokens alone


# Known fields that are not honoured, and the values that ask for nothing; null is always one of them.
REFUSED: dict[str, tuple[Any, ...]] = {
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "spaces_between_special_tokens": (True,),
    "logits_processors": ([],),
    "mm_processor_kwargs": ({},),
    "kv_transfer_params": ({},),
    "store": (False,),  # nothing is kept
    "service_tier": ("auto", "default"),
}
