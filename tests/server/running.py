"""A whole server on loopback: real HTTP, real engine, a fake device whose pace the test sets."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.plan import StepResult
from jaxserve.server.lifecycle import Loaded, Server, ServerOptions
from jaxserve.server.served import ServedModel
from jaxserve.tokenizer.chat import ChatTemplate
from tests.fakes import FakeModel, FakeRunner, FakeTokenizer

MODEL = "fake-model"
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'user' and message.content == 'refuse me' %}{{ raise_exception('no') }}{% endif %}"
    "<turn>{{ message.role }}\n{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}"
)
CONFIG = EngineConfig(max_model_len=256, num_pages=257, page_size=4, max_num_seqs=4, max_num_queued=64)


class PacedRunner(FakeRunner):
    """A fake device that takes `step_s` for a step, breaks on demand, and stands still while held."""

    def __init__(self, config: EngineConfig, model: FakeModel | None = None):
        super().__init__(config, model)
        self.step_s = 0.0
        self.breaks = False
        self._free = threading.Event()
        self._free.set()

    def hold(self) -> None:
        self._free.clear()

    def release(self) -> None:
        self._free.set()

    def fetch(self, handle: int) -> tuple[StepResult, ...]:
        if self.step_s:
            time.sleep(self.step_s)
        assert self._free.wait(30), "a test forgot to release the device"
        if self.breaks:
            raise RuntimeError("the device is on fire")
        return super().fetch(handle)


def served_model(config: EngineConfig = CONFIG, tokenizer: Any = None, **kwargs: Any) -> ServedModel:
    tokenizer = tokenizer or FakeTokenizer()
    defaults: dict[str, Any] = {
        "names": (MODEL, "second/name"),
        "tokenizer": tokenizer,
        "max_model_len": config.max_model_len,
        "vocab_size": tokenizer.vocab_size,
        "created": 1_700_000_000,
        "chat_template": ChatTemplate(CHAT_TEMPLATE, bos_token="<bos>", eos_token="<eos>"),
    }
    return ServedModel(**{**defaults, **kwargs})


class RunningServer:
    """A context manager. The server runs in a thread of its own, with its own event loop."""

    def __init__(
        self,
        *,
        config: EngineConfig = CONFIG,
        fake_model: FakeModel | None = None,
        options: ServerOptions | None = None,
        attach: bool = True,
        **model: Any,
    ):
        self.runner = PacedRunner(config, fake_model)
        self.model = served_model(config, **model)
        self.options = options or ServerOptions(port=0, shutdown_timeout_s=5)
        self._config = config
        self._attach = attach
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)

    def __enter__(self) -> RunningServer:
        self._thread.start()
        self.server: Server = self.call(self._start)
        self.url = self.server.url
        self.port = int(self.url.rpartition(":")[2])
        self.engine = Engine(
            self._config, self.runner, self.model.tokenizer, deliver=self.server.deliver
        )
        if self._attach:
            self.attach()
        return self

    def __exit__(self, *exc: object) -> None:
        self.runner.release()
        self.call(self.server.close)
        self.engine.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def attach(self) -> None:
        self.engine.start()

        async def attach() -> None:
            self.server.attach(Loaded(self.model, self.engine, lambda: 0))

        self.call(attach)

    def call(self, function: Callable[[], Any], timeout_s: float = 30) -> Any:
        """Run a coroutine function on the server's loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(function(), self._loop).result(timeout_s)

    async def _start(self) -> Server:
        server = Server(self.options)
        await server.start()
        return server

    # What tests do with it.

    def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """(status, headers, body); a body that is no bytes is sent as JSON."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": "application/json", **(headers or {})}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30) as response:
                return response.status, dict(response.headers), response.read()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, dict(error.headers), error.read()

    def get(self, path: str) -> tuple[int, Any]:
        status, _, raw = self.request("GET", path)
        return status, json.loads(raw) if raw else None

    def post(self, path: str, body: Any) -> tuple[int, Any]:
        status, _, raw = self.request("POST", path, body)
        return status, json.loads(raw)

    def stream(self, path: str, body: dict[str, Any]) -> list[Any]:
        """The data of each event of a streamed answer, parsed; "[DONE]" as it is."""
        status, headers, raw = self.request("POST", path, {**body, "stream": True})
        assert status == 200, raw
        assert headers["Content-Type"].startswith("text/event-stream")
        events = raw.decode("ascii").split("\n\n")
        assert events.pop() == ""
        assert all(event.startswith("data: ") and "\n" not in event for event in events)
        return [event[6:] if event == "data: [DONE]" else json.loads(event[6:]) for event in events]

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=10)

    def metric(self, name: str) -> float:
        """The sum over all label values of one sample name."""
        _, _, raw = self.request("GET", "/metrics")
        lines = [line for line in raw.decode().splitlines() if line.partition("{")[0] == name]
        assert lines, f"no metric {name}"
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    def wait_idle(self, timeout_s: float = 5) -> None:
        """Wait until the engine has no request, no used page, and no answer is open."""
        self.wait(
            lambda: (s := self.engine.stats()).num_running == s.num_waiting == s.num_pages_used == 0,
            timeout_s,
        )
        self.wait(lambda: self.server.num_open == 0, timeout_s)

    def wait(self, condition: Callable[[], bool], timeout_s: float = 5) -> None:
        deadline_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline_s, f"still not so: {self.engine.stats()}"
            time.sleep(0.005)


def raw_post(path: str, body: Any, *, headers: str = "") -> bytes:
    """A POST as it stands on the wire."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n{headers}\r\n"
    )
    return head.encode() + data


def text_prompt(num_tokens: int) -> str:
    """A prompt of exactly so many tokens of the fake tokenizer."""
    return "xy" * (num_tokens // 2) + "x" * (num_tokens % 2)

