"""How to pick tokens: the sampling fields that every generating route takes."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from jaxserve.server.schema.body import Body
from jaxserve.server.schema.fields import Int


class SamplingBody(Body):
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[Int, Field(ge=-1, lt=2**31)] = 0  # 0 and -1: off
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    seed: Annotated[Int, Field(ge=-(2**63), lt=2**64)] | None = None
