from __future__ import annotations

import json
from typing import Any

import pytest

from jaxserve.engine.config import EngineConfig
from jaxserve.server.lifecycle import ServerOptions
from tests.server.running import CONFIG, MODEL, RunningServer, raw_post, text_prompt

MESSAGES = [{"role": "user", "content": "hello"}]
N = CONFIG.max_model_len
BOTH = ["/v1/completions", "/v1/chat/completions"]


def error_of(raw: bytes) -> dict[str, Any]:
    """The error in an error body, which has OpenAI's shape and nothing of a traceback."""
    assert b"Traceback" not in raw
    body = json.loads(raw)
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["message"]
    return body["error"]


def test_health_is_200_and_empty(server):
    status, _, raw = server.request("GET", "/health")
    assert (status, raw) == (200, b"")


@pytest.mark.parametrize("prefix", ["/v1", ""])
def test_models_are_listed_with_their_context_length(server, prefix):
    status, body = server.get(f"{prefix}/models")
    assert (status, body["object"]) == (200, "list")
    assert [card["id"] for card in body["data"]] == [MODEL, "second/name"]
    for card in body["data"]:
        assert server.get(f"{prefix}/models/{card['id']}") == (200, card)
        assert server.get(f"{prefix}/models/{card['id'].replace('/', '%2F')}") == (200, card)
        assert (card["object"], card["max_model_len"]) == ("model", N)


@pytest.mark.parametrize("path", ["/v1/completions", "/completions"])
def test_a_completion_has_the_shape_that_clients_expect(server, path):
    status, body = server.post(path, {"model": MODEL, "prompt": "hello", "max_tokens": 5})
    assert status == 200
    assert body["id"].startswith("cmpl-")
    assert (body["object"], body["model"]) == ("text_completion", MODEL)
    assert isinstance(body["created"], int)
    assert body["system_fingerprint"]
    [choice] = body["choices"]
    assert set(choice) == {"index", "text", "logprobs", "finish_reason", "stop_reason"}
    assert (len(choice["text"]), choice["finish_reason"]) == (5, "length")
    assert body["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 5,
        "total_tokens": 10,
        "prompt_tokens_details": {"cached_tokens": body["usage"]["prompt_tokens_details"]["cached_tokens"]},
    }


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/chat/completions"])
def test_a_chat_answer_has_the_shape_that_clients_expect(server, path):
    status, body = server.post(path, {"model": "second/name", "messages": MESSAGES, "max_tokens": 4})
    assert status == 200
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["model"]) == ("chat.completion", "second/name")
    [choice] = body["choices"]
    assert set(choice) == {"index", "message", "logprobs", "finish_reason", "stop_reason"}
    assert len(choice["message"]["content"]) == 4
    assert body["usage"]["completion_tokens"] == 4


def test_batched_prompts_answer_in_order(server):
    prompts = ["one", "two", "three", "four", "five", "six", "seven"]
    fields = {"max_tokens": 6, "seed": 3}
    _, together = server.post("/v1/completions", {"prompt": prompts, **fields})
    assert [choice["index"] for choice in together["choices"]] == list(range(7))
    for prompt, choice in zip(prompts, together["choices"]):
        _, alone = server.post("/v1/completions", {"prompt": prompt, **fields})
        assert choice["text"] == alone["choices"][0]["text"]
    num_prompt_tokens = sum(len(server.model.tokenizer.encode(prompt)) for prompt in prompts)
    usage = together["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (num_prompt_tokens, 42)
    assert usage["total_tokens"] == num_prompt_tokens + 42


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_usage_tells_how_much_of_a_prompt_was_cached_and_salts_keep_tenants_apart(server, path):
    text = f"a prompt that nobody else has sent to {path}"

    def cached(**fields: Any) -> int:
        body = {"max_tokens": 2, **fields}
        body |= {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
        _, whole = server.post(path, body)
        streamed = server.stream(path, {**body, "stream_options": {"include_usage": True}})[-2]
        assert whole["usage"]["prompt_tokens"] == streamed["usage"]["prompt_tokens"]
        again = streamed["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert again == (whole["usage"]["prompt_tokens"] - 1) // 4 * 4
        return whole["usage"]["prompt_tokens_details"]["cached_tokens"]

    template = 8 if "chat" in path else 0  # what all chats begin with
    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="b") == 0
    assert cached() <= template
    assert cached(cache_salt="a") == cached(cache_salt=None) > template


def test_a_seed_repeats_an_answer_and_no_seed_does_not(server):
    def text(**fields: Any) -> str:
        _, body = server.post("/v1/completions", {"prompt": "x", "max_tokens": 12, **fields})
        return body["choices"][0]["text"]

    assert text(seed=1) == text(seed=1) != text(seed=2)
    assert text() != text()


def test_a_stop_string_ends_the_answer_and_is_told(server):
    body = {"prompt": "x", "max_tokens": 40, "seed": 5}
    _, free = server.post("/v1/completions", body)
    text = free["choices"][0]["text"]
    stop = text[10:12]
    _, stopped = server.post("/v1/completions", {**body, "stop": stop})
    [choice] = stopped["choices"]
    assert choice["text"] == text[: text.index(stop)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)


# (method, path, body, headers) -> (status, param, part of the message)
ERRORS: list[tuple[str, str, Any, dict[str, str], int, str | None, str]] = [
    ("GET", "/", None, {}, 404, None, "There is no GET /"),
    ("GET", "/v1/nothing", None, {}, 404, None, "There is no"),
    ("POST", "/v1/completion", {"prompt": "x"}, {}, 404, None, "/v1/completions"),
    ("GET", "/v1/models/gpt-4", None, {}, 404, "model", "'gpt-4' does not exist"),
    ("POST", "/v1/models", {}, {}, 405, None, "GET"),
    ("DELETE", "/health", None, {}, 405, None, "GET"),
    *[
        error
        for path in BOTH
        for error in (
            ("GET", path, None, {}, 405, None, "use POST"),
            ("POST", path, b"a=b", {"Content-Type": "application/x-www-form-urlencoded"}, 415, None, "JSON"),
            ("POST", path, b"{}", {"Content-Type": "text/plain"}, 415, None, "application/json"),
            ("POST", path, b"", {}, 400, None, "not valid JSON"),
            ("POST", path, b"{x", {}, 400, None, "not valid JSON"),
            ("POST", path, b"[]", {}, 400, None, "JSON object"),
            ("POST", path, b'"s"', {}, 400, None, "JSON object"),
            ("POST", path, b"null", {}, 400, None, "JSON object"),
            ("POST", path, b'{"temperature": NaN}', {}, 400, None, "NaN"),
            ("POST", path, b'{"temperature": -Infinity}', {}, 400, None, "Infinity"),
            ("POST", path, b"\xff\xfe\xfd", {}, 400, None, "not valid"),
            ("POST", path, b"[" * 200_000, {}, 400, None, "nested too deeply"),
            ("POST", path, b"{}", {"Content-Encoding": "gzip"}, 400, None, "can't be read"),
        )
    ],
    ("POST", BOTH[0], {"prompt": "x", "temperature": -1}, {}, 400, "temperature", "at least 0"),
    ("POST", BOTH[0], b'{"prompt": "x", "temperature": 1e999}', {}, 400, "temperature", "finite"),
    ("POST", BOTH[0], {"prompt": "x", "model": "gpt-4"}, {}, 404, "model", "does not exist"),
    ("POST", BOTH[0], {"prompt": ""}, {}, 400, "prompt", "must not be empty"),
    ("POST", BOTH[0], {"prompt": []}, {}, 400, "prompt", "must not be empty"),
    ("POST", BOTH[0], {"prompt": "x", "max_tokens": 0}, {}, 400, "max_tokens", "at least 1"),
    ("POST", BOTH[0], {"prompt": "x", "stop": [""]}, {}, 400, "stop", "empty string"),
    ("POST", BOTH[0], {"prompt": "x", "stop_token_ids": [10**6]}, {}, 400, "stop_token_ids[0]", "vocabulary"),
    ("POST", BOTH[0], {"prompt": "x", "store": True}, {}, 400, "store", "not supported"),
    ("POST", BOTH[0], {"prompt": text_prompt(N)}, {}, 400, "prompt", f"maximum context length is {N} tokens"),
    ("POST", BOTH[0], {"prompt": "a" * 2**21}, {}, 400, "prompt", f"maximum context length is {N} tokens"),
    ("POST", BOTH[0], {"prompt": "hi", "max_tokens": N - 1}, {}, 400, "max_tokens", f"requested {N + 1}"),
    ("POST", BOTH[1], {"messages": []}, {}, 400, "messages", "at least 1"),
    ("POST", BOTH[1], {"messages": MESSAGES, "tools": [{}]}, {}, 400, "tools[0].type", "required"),
    ("POST", BOTH[1], {"messages": [{"role": "user", "content": "refuse me"}]}, {}, 400, "messages", "no"),
]


@pytest.mark.parametrize(("method", "path", "body", "headers", "status", "param", "text"), ERRORS)
def test_every_error_is_json_with_its_status_and_field(
    server, method, path, body, headers, status, param, text
):
    got, got_headers, raw = server.request(method, path, body, headers)
    error = error_of(raw)
    assert (got, error["param"]) == (status, param)
    assert text in error["message"]
    assert got_headers["Content-Type"].startswith("application/json")


def test_a_method_that_is_not_possible_names_those_that_are(server):
    _, headers, _ = server.request("GET", "/v1/completions")
    assert headers["Allow"] == "POST"


def test_a_streamed_request_that_is_refused_has_a_real_status(server):
    for path, body in ((BOTH[0], {"prompt": ""}), (BOTH[1], {"messages": []})):
        status, headers, raw = server.request("POST", path, {**body, "stream": True})
        assert status == 400
        assert headers["Content-Type"].startswith("application/json")
        error_of(raw)


def test_a_prompt_may_be_one_token_under_the_limit_and_no_more(server):
    for num_tokens, status in ((N - 1, 200), (N, 400), (N + 1, 400)):
        body = {"prompt": text_prompt(num_tokens), "max_tokens": 1}
        got, answer = server.post("/v1/completions", body)
        assert got == status
        if status == 200:
            assert answer["usage"]["total_tokens"] == N
        else:
            assert f"has {num_tokens} tokens" in answer["error"]["message"]


def test_after_every_error_the_server_still_serves(server):
    for method, path, body, headers, *_ in ERRORS[::7]:
        server.request(method, path, body, headers)
    assert server.post("/v1/completions", {"prompt": "x"})[0] == 200


def test_a_body_over_the_limit_is_413_with_json():
    options = ServerOptions(port=0, max_body_bytes=10_000)
    with RunningServer(options=options) as running:
        body = {"prompt": "x" * 20_000}
        status, _, raw = running.request("POST", "/v1/completions", body)
        assert status == 413
        assert "10000 bytes" in error_of(raw)["message"]
        chunked = json.dumps(body).encode()
        connection = running.connect()
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(chunked), chunked)
        )
        assert connection.recv(100).startswith(b"HTTP/1.1 413")
        connection.close()
        assert running.post("/v1/completions", {"prompt": "x" * 9, "max_tokens": 1})[0] == 200


def test_a_full_queue_is_429_and_says_when_to_come_back():
    config = EngineConfig(max_model_len=64, num_pages=65, page_size=4, max_num_seqs=1, max_num_queued=1)
    with RunningServer(config=config) as running:
        running.runner.hold()
        waiting = [running.connect() for _ in range(2)]
        for connection in waiting:
            connection.sendall(raw_post("/v1/completions", {"prompt": "x", "max_tokens": 8}))
        running.wait(lambda: running.server.num_open == 2)
        status, headers, raw = running.request("POST", "/v1/completions", {"prompt": "y"})
        assert (status, error_of(raw)["code"]) == (429, "queue_full")
        assert int(headers["Retry-After"]) >= 1
        assert running.metric("jaxserve:admission_rejections_total") == 1
        running.runner.release()
        for connection in waiting:
            assert connection.recv(50).startswith(b"HTTP/1.1 200")
            connection.close()
        running.wait_idle()
        assert running.post("/v1/completions", {"prompt": "y"})[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_timeout_is_504_or_an_error_in_the_stream_and_frees_everything(server, stream):
    server.runner.step_s = 0.02
    body = {"prompt": "x", "max_tokens": 200, "timeout": 0.3, "stream": stream}
    status, _, raw = server.request("POST", "/v1/completions", body)
    if stream:
        assert status == 200
        events = raw.decode().split("\n\n")
        assert events[-2] == "data: [DONE]"
        error = json.loads(events[-3][6:])["error"]
    else:
        assert status == 504
        error = error_of(raw)
    assert (error["type"], error["code"]) == ("timeout", "timeout")
    assert error["message"].startswith("The request's timeout of 0.3 s has passed, after ")
    server.wait_idle()


def test_a_priority_that_the_server_does_not_go_by_is_400(server):
    status, _, raw = server.request("POST", "/v1/completions", {"prompt": "x", "priority": 1})
    assert (status, error_of(raw)["param"]) == (400, "priority")


def test_a_batch_that_does_not_fit_into_the_queue_leaves_nothing_behind():
    config = EngineConfig(max_model_len=64, num_pages=65, page_size=4, max_num_seqs=1, max_num_queued=2)
    with RunningServer(config=config) as running:
        status, _ = running.post("/v1/completions", {"prompt": ["x"] * 20, "max_tokens": 60})
        assert status == 429
        running.wait_idle()


def test_a_bug_in_a_handler_is_a_500_without_a_traceback(server, monkeypatch):
    def broken(*args: object) -> None:
        raise ZeroDivisionError("secret of the house")

    monkeypatch.setattr("jaxserve.server.openai.loads", broken)
    status, _, raw = server.request("POST", "/v1/completions", {"prompt": "x"})
    assert status == 500
    assert "secret" not in error_of(raw)["message"]
