"""A server to talk to, and a launcher that loads a fake model."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest

from jaxserve.engine.engine import Engine
from jaxserve.types import KernelsInUse, MemoryUse
from tests.fakes import FakeModel
from tests.server.running import CONFIG, PacedRunner, RunningServer, served_model


@pytest.fixture(scope="module")
def remote() -> Iterator[RunningServer]:
    with RunningServer() as running:
        yield running


@pytest.fixture
def fake_launch(monkeypatch) -> Iterator[types.ModuleType]:
    """A jaxserve.launch that loads a fake model; `options` is what it was asked for."""
    launch = types.ModuleType("jaxserve.launch")

    class LaunchOptions:
        def __init__(self, **fields: Any):
            launch.options = fields  # type: ignore[attr-defined]

    def load_engine(options: LaunchOptions, *, deliver: Any, progress: Any) -> types.SimpleNamespace:
        progress("loading", 0, 2)
        progress("loading", 2, 2)
        model = served_model()
        runner = launch.runner = PacedRunner(CONFIG, FakeModel())  # type: ignore[attr-defined]
        engine = launch.engine = Engine(CONFIG, runner, model.tokenizer, deliver=deliver)  # type: ignore[attr-defined]
        engine.start()
        return types.SimpleNamespace(
            engine=engine, tokenizer=model.tokenizer, chat_template=model.chat_template, config=CONFIG,
            generation=model.generation, model_name="fake-model", vocab_size=model.vocab_size,
            compilations_after_warmup=lambda: 0, memory=MemoryUse(12_000_000, 2_000_000, 1000, 2000, 256, 7),
            kernels=KernelsInUse("xla", "xla", "XLA's: no compiler was there"),
        )  # fmt: skip

    launch.LaunchOptions, launch.load_engine = LaunchOptions, load_engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jaxserve.launch", launch)
    yield launch
    if hasattr(launch, "engine"):
        launch.engine.stop()
