"""The engine with its thread, between a receiver and a device that tests steer."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from jaxserve.engine.engine import Engine
from tests.engine.steered import CONFIG, TOKENIZER, Inbox, SteeredRunner


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def runner() -> SteeredRunner:
    return SteeredRunner()


@pytest.fixture
def engine(inbox: Inbox, runner: SteeredRunner) -> Iterator[Engine]:
    others = set(threading.enumerate())  # of servers that other tests share
    engine = Engine(CONFIG, runner, TOKENIZER, deliver=inbox.deliver, vocab_size=TOKENIZER.vocab_size)
    engine.start()
    yield engine
    runner.gate.set()
    inbox.gate.set()
    engine.stop()
    left = {thread.name for thread in set(threading.enumerate()) - others}
    assert not {"jaxserve-engine", "jaxserve-watchdog"} & left
