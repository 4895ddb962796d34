"""Every backend that can run here, by name."""

from __future__ import annotations

import pytest

from jaxserve import native
from jaxserve.ops.backend import XLA, Backend, choose


@pytest.fixture(params=["xla", "native"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "xla":
        return XLA
    usable, reason = native.available()
    if not usable:
        pytest.skip(f"the C++ kernels can't be used: {reason}")
    return choose("native", "native")
