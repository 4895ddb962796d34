"""One running server for the tests that leave it as they found it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.running import RunningServer


@pytest.fixture(scope="session")
def shared_server() -> Iterator[RunningServer]:
    with RunningServer() as running:
        yield running


@pytest.fixture
def server(shared_server: RunningServer) -> Iterator[RunningServer]:
    """The shared server; every test must leave it idle."""
    yield shared_server
    shared_server.runner.step_s = 0.0
    shared_server.runner.release()
    shared_server.wait_idle()
