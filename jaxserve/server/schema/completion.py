"""The body of /v1/completions."""

from __future__ import annotations

from jaxserve.server.schema.body import object_of, validate
from jaxserve.server.schema.fields import Prompts
from jaxserve.server.schema.generation import REFUSED, GenerationBody


class CompletionBody(GenerationBody):
    prompt: Prompts


REFUSED_COMPLETION = REFUSED | {
    "echo": (False,),
    "suffix": ("",),
    "logprobs": (),
    "add_special_tokens": (True,),
}


def validate_completion(body: object) -> CompletionBody:
    """The completion request in `body`; raises RequestError that names the field."""
    return validate(CompletionBody, object_of(body), REFUSED_COMPLETION)
