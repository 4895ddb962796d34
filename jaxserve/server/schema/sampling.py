"""How to pick tokens: the sampling fields that every generating route takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Self

from pydantic import Field

from jaxserve.server.schema.body import Body
from jaxserve.server.schema.fields import BadWords, Int, LogitBias, SomeTokenIds


class SamplingBody(Body):
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[Int, Field(ge=-1, lt=2**31)] = 0  # 0 and -1: off
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[Int, Field(ge=-(2**63), lt=2**64)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] = 1.0  # 1: off
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    logit_bias: LogitBias = {}
    allowed_token_ids: SomeTokenIds | None = None  # null: all
    bad_words: BadWords = []

    def completed(self, defaults: Mapping[str, float]) -> Self:
        """With the model's own defaults for fields that the client left out."""
        return self.model_copy(update={k: v for k, v in defaults.items() if k not in self.model_fields_set})
