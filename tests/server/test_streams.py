from __future__ import annotations

import json
from typing import Any

import pytest

from tests.fakes import FakeModel, FakeTokenizer
from tests.server.running import RunningServer, raw_post

MESSAGES = [{"role": "user", "content": "hello"}]
USAGE = {"stream_options": {"include_usage": True}}
REQUESTS = [
    ("/v1/completions", {"prompt": "hello", "max_tokens": 30, "seed": 4}),
    ("/v1/completions", {"prompt": ["a", "bb", "ccc"], "max_tokens": 20, "seed": 4}),
    ("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 30, "seed": 4}),
    ("/v1/completions", {"prompt": "hello", "max_tokens": 60, "seed": 4, "stop": ["e", "xy"]}),
]


def texts(events: list[Any]) -> dict[int, str]:
    """The joined text of each choice."""
    joined: dict[int, str] = {}
    for event in events[:-1]:
        for choice in event["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            joined[choice["index"]] = joined.get(choice["index"], "") + text
    return joined


def whole_texts(body: dict[str, Any]) -> dict[int, str]:
    return {
        choice["index"]: choice["text"] if "text" in choice else choice["message"]["content"]
        for choice in body["choices"]
    }


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_a_joined_stream_is_the_whole_answer(server, path, body):
    _, whole = server.post(path, body)
    events = server.stream(path, {**body, **USAGE})
    assert events[-1] == "[DONE]"
    assert texts(events) == whole_texts(whole)
    # The second time the prefix cache has the prompt.
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [events[-2]["usage"][key] for key in counts] == [whole["usage"][key] for key in counts]
    finishes = {
        choice["index"]: (choice["finish_reason"], choice["stop_reason"])
        for event in events[:-1]
        for choice in event["choices"]
        if choice["finish_reason"] is not None
    }
    assert finishes == {c["index"]: (c["finish_reason"], c["stop_reason"]) for c in whole["choices"]}


def test_a_stream_has_no_usage_unless_asked(server):
    for path, body in REQUESTS:
        events = server.stream(path, body)
        assert all("usage" not in event and event["choices"] for event in events[:-1])


def test_the_usage_chunk_comes_last_once_and_has_no_choices(server):
    events = server.stream("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 4, **USAGE})
    with_usage = [event for event in events[:-1] if event["usage"] is not None]
    assert with_usage == [events[-2]]
    assert (events[-2]["choices"], events[-2]["usage"]["completion_tokens"]) == ([], 8)


def test_the_first_chat_chunk_alone_has_the_role(server):
    first, *others, done = server.stream("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 5})
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert all("role" not in event["choices"][0]["delta"] for event in others)
    assert done == "[DONE]"


def test_characters_of_several_tokens_arrive_whole():
    # Ids of half characters: the fake model picks among bytes that only together are text.
    ids = tuple(3 + byte for byte in "é🙂a".encode())
    with RunningServer(fake_model=FakeModel(ids=ids)) as running:
        body = {"prompt": "x", "max_tokens": 120, "seed": 1}
        _, whole = running.post("/v1/completions", body)
        running.runner.step_s = 0.005  # slow enough that the answer is not sent as one event
        events = running.stream("/v1/completions", body)
        assert texts(events) == whole_texts(whole)
        assert len(events) > 3
        assert "é" in texts(events)[0]


def test_an_answer_cut_by_eos_says_stop():
    with RunningServer(fake_model=FakeModel(eos_every=3)) as running:
        _, body = running.post("/v1/completions", {"prompt": "x", "max_tokens": 200, "seed": 0})
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["choices"][0]["stop_reason"] is None
        _, body = running.post(
            "/v1/completions", {"prompt": "x", "max_tokens": 50, "seed": 0, "ignore_eos": True}
        )
        assert body["choices"][0]["finish_reason"] == "length"
        assert body["usage"]["completion_tokens"] == 50


def test_tokens_arrive_as_they_are_made_and_not_at_the_end(server):
    server.runner.hold()
    with server.connect() as connection:
        connection.sendall(
            raw_post("/v1/completions", {"prompt": "x", "max_tokens": 50, "seed": 1, "stream": True})
        )
        server.runner.step_s = 0.02
        server.runner.release()
        received = b""
        while received.count(b"data: ") < 3:
            received += connection.recv(65536)
        assert b"[DONE]" not in received
        assert server.engine.stats().num_running == 1


def test_a_reader_that_pauses_costs_neither_tokens_nor_neighbours(server):
    body = {"prompt": "x", "max_tokens": 200, "seed": 2, "stream": True, **USAGE}
    with server.connect() as slow:
        slow.sendall(raw_post("/v1/completions", body))
        server.wait(lambda: server.engine.stats().num_steps.get("decode", 0) > 0)
        assert server.post("/v1/completions", {"prompt": "y", "max_tokens": 3})[0] == 200
        server.wait_idle()
        received = b""
        while not received.endswith(b"0\r\n\r\n"):
            received += slow.recv(1 << 16)
    assert b'"completion_tokens":200' in received


def test_an_engine_that_breaks_in_the_middle_ends_the_stream_with_an_error():
    with RunningServer() as running:
        running.runner.hold()
        connection = running.connect()
        connection.sendall(
            raw_post("/v1/completions", {"prompt": "x", "max_tokens": 100, "stream": True}, headers="")
        )
        running.runner.step_s = 0.02
        running.runner.release()
        received = connection.recv(1 << 16)
        assert received.startswith(b"HTTP/1.1 200")
        running.runner.breaks = True
        while not received.endswith(b"0\r\n\r\n"):
            received += connection.recv(1 << 16)
        connection.close()
        events = [
            line.removeprefix(b"data: ") for line in received.splitlines() if line.startswith(b"data: ")
        ]
        assert events[-1] == b"[DONE]"
        error = json.loads(events[-2])["error"]
        assert error["type"] == "server_error"
        assert "fire" not in error["message"]
        # The engine is dead now, and everybody learns it.
        running.wait(lambda: running.get("/health")[0] == 503)
        status, headers, raw = running.request("POST", "/v1/completions", {"prompt": "x"})
        assert status == 503
        assert int(headers["Retry-After"]) > 0
        assert json.loads(raw)["error"]["type"] == "service_unavailable"


def test_an_engine_that_breaks_before_the_first_token_is_a_500():
    for stream in (False, True):
        with RunningServer() as running:
            running.runner.breaks = True
            status, body = running.post("/v1/completions", {"prompt": "x", "stream": stream})
            assert status == 500
            assert body["error"]["type"] == "server_error"


def test_special_tokens_are_shown_only_when_asked_for():
    tokenizer = FakeTokenizer()
    ids = (2, 3 + ord("a"))  # <turn>, a
    with RunningServer(fake_model=FakeModel(ids=ids), tokenizer=tokenizer) as running:
        body = {"prompt": "x", "max_tokens": 40, "seed": 3}
        _, hidden = running.post("/v1/completions", body)
        _, shown = running.post("/v1/completions", {**body, "skip_special_tokens": False})
        assert "<turn>" not in hidden["choices"][0]["text"]
        assert shown["choices"][0]["text"].replace("<turn>", "") == hidden["choices"][0]["text"]
        assert "<turn>" in shown["choices"][0]["text"]
