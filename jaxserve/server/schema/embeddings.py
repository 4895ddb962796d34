"""The body of /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from jaxserve.server.schema.body import Body, object_of, validate
from jaxserve.server.schema.fields import Int, Prompts
from jaxserve.server.schema.generation import MAX_PRIORITY, MAX_SALT_CHARS


class EmbeddingsBody(Body):
    model: str | None = None
    input: Prompts
    encoding_format: Literal["float", "base64"] = "float"
    truncate_prompt_tokens: Annotated[Int, Field(ge=-1, lt=2**31)] | None = None
    add_special_tokens: bool = True
    priority: Annotated[Int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] = 0
    timeout: Annotated[float, Field(gt=0, le=86400)] | None = None  # seconds from arrival to the end
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARS)] | None = None
    user: str | None = None  # a label of the client's own


REFUSED_EMBEDDINGS: dict[str, tuple[Any, ...]] = {
    "dimensions": (),  # cutting vectors is for models that were trained for it
    "normalize": (True,),
    "embed_dtype": ("float32",),
    "endianness": ("little", "native"),
}


def validate_embeddings(body: object) -> EmbeddingsBody:
    """The request in `body`; raises RequestError that names the field."""
    return validate(EmbeddingsBody, object_of(body), REFUSED_EMBEDDINGS)
