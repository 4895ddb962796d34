"""Grammars that cost too much, over HTTP: their own requests are told so, and others are answered as ever."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

from jaxserve.engine.config import EngineConfig
from jaxserve.errors import GrammarLimitError
from jaxserve.grammar import compiler as grammar_compiler
from jaxserve.grammar.spec import GrammarSpec
from jaxserve.server import compiling
from tests.fakes import FakeModel
from tests.server.running import RunningServer, raw_post
from tests.server.test_raw_sockets import read_all

CONFIG = EngineConfig(max_model_len=4096, num_pages=4097, page_size=4, max_num_seqs=4, max_num_queued=64)
CHAT, RESPONSES = "/v1/chat/completions", "/v1/responses"
MESSAGES = [{"role": "user", "content": "x"}]
PLAIN = {"messages": MESSAGES, "max_tokens": 30, "seed": 3}
HELD = {"messages": MESSAGES, "max_tokens": 30, "structured_outputs": {"regex": "[ab]{3}"}}
PATTERNS = [{"type": "string", "pattern": f"a.{{{i}}}b"} for i in range(60)]
SCHEMA = {"allOf": PATTERNS}
PARAMETERS = {"properties": {"a": SCHEMA}}
EMPTY_RULES = "\n".join(["start: r0", *(f"r{i}: r{i + 1} r{i + 1}" for i in range(9000)), 'r9000: "x" |'])
HOSTILE = {
    "structured_outputs.json": {"structured_outputs": {"json": SCHEMA}},
    "structured_outputs.grammar": {
        "structured_outputs": {"grammar": EMPTY_RULES}
    },
    "response_format.json_schema.schema": {
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}
    },
    "tools": {
        "tools": [{"type": "function", "function": {"name": "f", "parameters": PARAMETERS}}],
        "tool_choice": "required",
    },
}  # fmt: skip


class Costly:
    """A grammar of nothing but a, whose third mask is too costly; it is asked for once the `gate` is open."""

    is_complete = False

    def __init__(self, gate: threading.Event | None = None):
        self._gate, self._taken = gate, 0

    def start(self) -> Costly:
        return Costly(self._gate)

    def advance(self, token_id: int) -> None:
        self._taken += 1

    def fill(self, words: np.ndarray) -> None:
        if self._taken == 2:
            assert self._gate is None or self._gate.wait(30)
            raise GrammarLimitError("too many items.")
        words[:] = 0
        words[3] = 1 << 4  # the letter a


class Compiler:
    """Gives out what the test puts in."""

    def __init__(self, made: Future[Any]):
        self._made = made

    def submit(self, spec: GrammarSpec) -> Future[Any]:
        return self._made


@pytest.fixture
def server() -> Iterator[RunningServer]:
    with RunningServer(config=CONFIG, fake_model=FakeModel(eos_every=9)) as running:
        yield running
        running.wait_idle()


def compiles_to(server: RunningServer, grammar: Any = None) -> None:
    """From now on every grammar is `grammar`; without one, none is ever compiled."""
    made: Future[Any] = Future()
    if grammar is not None:
        made.set_result(grammar)
    server.model.__dict__["grammars"] = Compiler(made)


@pytest.mark.parametrize("param", HOSTILE)
def test_a_hostile_grammar_is_a_400_and_neighbours_are_answered_as_they_are_alone(server, param, monkeypatch):
    monkeypatch.setattr(grammar_compiler, "TRIAL_CPU_S", 0.5)
    _, alone = server.post(CHAT, PLAIN)
    body = {"messages": MESSAGES, "max_tokens": 5, **HOSTILE[param]}
    with ThreadPoolExecutor(6) as pool:
        refused = [pool.submit(server.post, CHAT, body) for _ in range(2)]
        free = [pool.submit(server.post, CHAT, PLAIN) for _ in range(2)]
        held = [pool.submit(server.post, CHAT, HELD) for _ in range(2)]
        for future in refused:
            status, answer = future.result()
            assert status == 400
            assert answer["error"]["code"] == "invalid_grammar"
            assert answer["error"]["param"] == param
        for future in free:
            assert future.result()[1]["choices"] == alone["choices"]
        for future in held:
            assert len(future.result()[1]["choices"][0]["message"]["content"]) == 3


def test_an_answer_whose_mask_is_too_costly_is_a_400_that_says_so(server):
    compiles_to(server, Costly())
    _, alone = server.post(CHAT, PLAIN)
    with ThreadPoolExecutor(3) as pool:
        held = pool.submit(server.post, CHAT, HELD)
        free = [pool.submit(server.post, CHAT, PLAIN) for _ in range(2)]
        status, answer = held.result()
        assert status == 400
        assert answer["error"]["type"] == "invalid_request_error"
        assert answer["error"]["code"] == "grammar_too_costly"
        assert "too many items. Make" in answer["error"]["message"]
        for future in free:
            assert future.result()[1]["choices"] == alone["choices"]
    assert server.get("/health")[0] == 200
    _, _, raw = server.request("GET", "/metrics")
    assert b'finished_reason="grammar",model_name="fake-model"} 1.0' in raw


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_in_a_stream_that_has_begun_it_is_the_last_event(server, path):
    gate = threading.Event()
    compiles_to(server, Costly(gate))
    form = {"format": {"type": "json_schema", "name": "x", "schema": {}}}
    body = HELD if path == CHAT else {"input": "x", "text": form}
    with server.connect() as connection:
        connection.sendall(raw_post(path, {**body, "stream": True}, headers="Connection: close\r\n"))
        begun = connection.recv(1 << 16)
        gate.set()
        received = begun + read_all(connection)
    assert received.startswith(b"HTTP/1.1 200")
    assert b"too many items. Make" in received
    if path == CHAT:
        assert b'"code": "grammar_too_costly"' in received
        assert b'"content":"a"' in received
        assert b"data: [DONE]" in received
    else:
        assert b'"type":"response.failed"' in received
        assert b'"code":"invalid_prompt"' in received


@pytest.mark.parametrize("path", [CHAT, RESPONSES])
def test_one_that_is_not_compiled_in_time_is_a_503_to_try_again(server, path, monkeypatch):
    monkeypatch.setattr(compiling, "COMPILE_TIMEOUT_S", 0.1)
    compiles_to(server)
    form = {"format": {"type": "json_schema", "name": "x", "schema": {}}}
    body = HELD if path == CHAT else {"input": "x", "text": form}
    status, headers, raw = server.request("POST", path, body)
    assert status == 503
    assert int(headers["Retry-After"]) >= 1
    error = json.loads(raw)["error"]
    assert "not compiled within 0.1 seconds" in error["message"]
    assert ("'text.format" if path == RESPONSES else "'structured_outputs.regex'") in error["message"]
    assert server.post(CHAT, PLAIN)[0] == 200


def test_one_more_than_may_wait_is_a_429_to_try_again(server, monkeypatch):
    monkeypatch.setattr(grammar_compiler, "MAX_WAITING", 0)
    status, headers, raw = server.request("POST", CHAT, HELD)
    assert status == 429
    assert int(headers["Retry-After"]) >= 1
    error = json.loads(raw)["error"]
    assert error["code"] == "grammar_queue_full"
    assert "'structured_outputs.regex'" in error["message"]
    assert server.post(CHAT, PLAIN)[0] == 200
    assert server.metric("jaxserve:admission_rejections_total") == 1
    monkeypatch.undo()
    assert server.post(CHAT, HELD)[0] == 200


def test_a_source_over_the_limit_is_a_400_that_names_it(server):
    body = {**HELD, "structured_outputs": {"regex": "a" * 300_000}}
    status, answer = server.post(CHAT, body)
    assert status == 400
    assert answer["error"]["param"] == "structured_outputs.regex"
    assert "262144" in answer["error"]["message"]
