"""A receiver that can block or fail, and a device that can stand still or fail."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from jaxserve.engine.config import EngineConfig
from jaxserve.types import Event, Request, SamplingParams
from tests.fakes import FakeModel, FakeRunner, FakeTokenizer

TOKENIZER = FakeTokenizer()
CONFIG = EngineConfig(
    max_model_len=100, page_size=4, num_pages=101, max_num_seqs=4, max_num_queued=3, max_prefill_tokens=32
)
PATIENCE_S = 20.0


class Inbox:
    """Collects events, lets tests wait for them, and can be made to block or to fail."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.events: dict[str, list[Event]] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def deliver(self, events: list[Event]) -> None:
        assert self.gate.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        with self.changed:
            for event in events:
                self.events.setdefault(event.request_id, []).append(event)
            self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE_S), f"still waiting; have {self.events}"

    def last(self, request_id: str) -> Event:
        self.wait_for(lambda: self.ended(request_id))
        return self.events[request_id][-1]

    def ended(self, request_id: str) -> bool:
        events = self.events.get(request_id)
        return bool(events) and events[-1].finish_reason is not None


class SteeredRunner(FakeRunner):
    """A device that can stand still, and fail on demand."""

    def __init__(self) -> None:
        super().__init__(CONFIG, FakeModel())
        self.gate = threading.Event()
        self.gate.set()
        self.launch_error: BaseException | None = None
        self.fetch_error: BaseException | None = None

    def launch(self, plan):
        if self.launch_error is not None:
            raise self.launch_error
        return super().launch(plan)

    def fetch(self, handle):
        assert self.gate.wait(PATIENCE_S)
        if self.fetch_error is not None:
            raise self.fetch_error
        return super().fetch(handle)


def request(name: str, num_prompt: int = 5, max_tokens: int = 10, **params) -> Request:
    return Request(name, (7,) * num_prompt, SamplingParams(max_tokens, **params), time.monotonic())
