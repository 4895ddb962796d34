"""The two real vocabularies, and what the reference says of them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from jaxserve.tokenizer import load
from jaxserve.weights.gguf import GGUFSource

GOLDEN = Path(__file__).parent.parent / "data" / "golden"


def golden(name: str) -> dict[str, Any]:
    return json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_gguf: Path) -> Mapping[str, Any]:
    return GGUFSource(smollm2_gguf).metadata


@pytest.fixture(scope="session")
def gemma3_metadata(gemma3_gguf: Path) -> Mapping[str, Any]:
    return GGUFSource(gemma3_gguf).metadata


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata):
    return load.from_gguf(smollm2_metadata)


@pytest.fixture(scope="session")
def gemma3(gemma3_metadata):
    return load.from_gguf(gemma3_metadata)


@pytest.fixture(scope="session")
def smollm2_golden() -> dict[str, Any]:
    return golden("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3_golden() -> dict[str, Any]:
    return golden("gemma3-270m")


@pytest.fixture(scope="session", params=["smollm2", "gemma3"])
def real(request):
    """Each real tokenizer in turn, with its golden figures."""
    return request.getfixturevalue(request.param), request.getfixturevalue(f"{request.param}_golden")
