"""The kernels, once for each instruction set that this CPU runs, or a skip with the reason."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from jaxserve import native
from jaxserve.native.library import NativeUnavailable, load


@pytest.fixture(scope="session")
def built() -> None:
    usable, reason = native.available()
    if not usable:
        pytest.skip(f"the C++ kernels can't be used: {reason}")


@pytest.fixture(params=["amx", "avx512", "avx2", "portable"])
def isa(request: pytest.FixtureRequest, built: None) -> Iterator[str]:
    library = load()
    before = library.isa()
    try:
        library.use_isa(request.param)
    except NativeUnavailable as error:
        pytest.skip(str(error))
    yield request.param
    library.use_isa(before)
