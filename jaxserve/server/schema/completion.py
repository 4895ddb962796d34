"""The body of /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from jaxserve.server.schema.body import object_of, validate
from jaxserve.server.schema.fields import Int, Prompts
from jaxserve.server.schema.generation import MAX_CHOICES, REFUSED, GenerationBody


class CompletionBody(GenerationBody):
    prompt: Prompts
    max_tokens: Annotated[Int, Field(ge=0, lt=2**31)] | None = None  # 0 only with `echo` or `prompt_logprobs`
    echo: bool = False
    logprobs: Annotated[Int, Field(ge=0)] | None = None  # how many of the likeliest at each place
    suffix: str | None = None
    best_of: Annotated[Int, Field(ge=1, le=MAX_CHOICES)] | None = None


REFUSED_COMPLETION: dict[str, tuple[Any, ...]] = REFUSED


def validate_completion(body: object) -> CompletionBody:
    """The completion request in `body`; raises RequestError that names the field."""
    return validate(CompletionBody, object_of(body), REFUSED_COMPLETION)
