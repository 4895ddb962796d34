"""Who may use the server, from where, and what it tells of them."""

from __future__ import annotations

import contextlib
import gzip
import json
import logging
import threading
from pathlib import Path

import pytest

from jaxserve.cli import main
from jaxserve.commands.serve import is_loopback
from jaxserve.errors import ConfigError
from jaxserve.server.errors import Unauthorized
from jaxserve.server.lifecycle import ServerOptions
from jaxserve.server.security import Keys, gather_keys
from tests.server.running import RunningServer, raw_post
from tests.server.test_raw_sockets import read_all

TLS = Path(__file__).parents[1] / "data" / "tls"
KEY, OTHER = "sk-first-key", "sk-second-key"
BEARER = {"Authorization": f"Bearer {KEY}"}
BODY = {"prompt": "x", "max_tokens": 2}
ORIGIN = "https://chat.example.org"
GUARDED = [
    ("GET", "/v1/models"), ("GET", "/models"), ("GET", "/v1/models/fake-model"),
    ("POST", "/v1/completions"), ("POST", "/completions"),
    ("POST", "/v1/chat/completions"), ("POST", "/chat/completions"),
    ("GET", "/v1/no-such-route"), ("DELETE", "/v1/models"), ("GET", "/"),
]  # fmt: skip


@pytest.fixture(scope="module")
def locked():
    options = ServerOptions(
        port=0,
        api_keys=(KEY, OTHER),
        max_requests_per_key=2,
        allowed_origins=(ORIGIN,),
        max_body_bytes=200_000,
    )
    with RunningServer(options=options) as running:
        yield running
        running.runner.release()
        running.wait_idle()


@pytest.mark.parametrize(("method", "path"), GUARDED)
@pytest.mark.parametrize(
    "authorization",
    [None, "", KEY, "Bearer", "Bearer ", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", f"Basic {KEY}"],
)
def test_without_a_right_key_every_route_of_the_api_is_401(locked, method, path, authorization):
    headers = {} if authorization is None else {"Authorization": authorization}
    status, answered, raw = locked.request(method, path, BODY if method == "POST" else None, headers)
    assert status == 401
    assert answered["WWW-Authenticate"] == "Bearer"
    error = json.loads(raw)["error"]
    assert error["code"] == "invalid_api_key"
    assert KEY not in error["message"]


@pytest.mark.parametrize("key", [KEY, OTHER])
@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_any_of_the_keys_opens_the_api(locked, key, scheme):
    headers = {"Authorization": f"{scheme} {key}"}
    assert locked.request("POST", "/v1/completions", BODY, headers)[0] == 200
    assert locked.request("GET", "/models", None, headers)[0] == 200


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_probes_and_scrapers_need_no_key(locked, path):
    assert locked.request("GET", path)[0] == 200


def test_a_body_is_not_asked_for_before_the_key_is_known(locked):
    with locked.connect() as connection:
        connection.sendall(raw_post("/v1/completions", BODY, headers="Expect: 100-continue\r\n")[:-10])
        assert connection.recv(1000).startswith(b"HTTP/1.1 401")


def test_every_known_key_is_compared_whichever_one_is_right(monkeypatch):
    compared = []
    monkeypatch.setattr(
        "jaxserve.server.security.hmac.compare_digest", lambda a, b: compared.append(b) or a == b
    )
    keys = Keys(["a", "b", "c"])
    for token, index in (("a", 0), ("c", 2)):
        compared.clear()
        assert keys.check(f"Bearer {token}") == index
        assert len(compared) == 3
    with pytest.raises(Unauthorized):
        keys.check("Bearer d")


def test_keys_come_from_the_command_line_a_file_and_the_environment(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# ours\nfrom-file\n\n  second  # of the lab\n")
    found = gather_keys(["given", "from-file"], file, {"JAXSERVE_API_KEY": "a b"})
    assert found == ("given", "from-file", "second", "a", "b")


@pytest.mark.parametrize("key", ["", "two words", "gr\u00fcn", "tab\t"])
def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(key):
    with pytest.raises(ConfigError, match="--api-key") as caught:
        gather_keys([key], None, {})
    assert not key or key not in str(caught.value)


def test_a_file_without_keys_does_not_leave_the_server_open(tmp_path):
    (tmp_path / "keys").write_text("# none yet\n")
    with pytest.raises(ConfigError, match="holds no key"):
        gather_keys([], tmp_path / "keys", {})
    with pytest.raises(ConfigError, match="can't be read"):
        gather_keys([], tmp_path / "missing", {})
    with pytest.raises(ConfigError, match="needs keys"):
        Keys([], max_requests=3)


def test_a_key_may_have_so_many_requests_under_way_and_no_more(locked):
    locked.runner.hold()
    slow = raw_post("/v1/completions", BODY, headers=f"Authorization: Bearer {KEY}\r\nConnection: close\r\n")
    with contextlib.ExitStack() as stack:
        first, second = (stack.enter_context(locked.connect()) for _ in range(2))
        first.sendall(slow)
        second.sendall(slow)
        locked.wait(lambda: locked.server.num_open == 2)
        status, headers, raw = locked.request("POST", "/v1/completions", BODY, BEARER)
        assert status == 429
        assert json.loads(raw)["error"]["code"] == "too_many_requests"
        assert headers["Retry-After"] == "1"
        assert locked.request("GET", "/v1/models", None, BEARER)[0] == 200  # asks for no work
        locked.runner.release()
        assert locked.request("POST", "/completions", BODY, {"Authorization": f"Bearer {OTHER}"})[0] == 200
        assert read_all(first).startswith(b"HTTP/1.1 200")
        assert read_all(second).startswith(b"HTTP/1.1 200")
    assert locked.request("POST", "/v1/completions", BODY, BEARER)[0] == 200


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        ("/v1/completions", {"prompt": ["x", "y"]}),
        ("/v1/completions", {"prompt": "x", "n": 2}),
        ("/v1/completions", {"prompt": "x", "best_of": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "n": 2, "stream": True}),
        ("/v1/embeddings", {"input": ["x", "y"]}),
    ],
)
def test_a_request_takes_as_many_places_as_it_asks_for_answers(locked, path, fields):
    body = fields if path == "/v1/embeddings" else {"max_tokens": 2, **fields}
    alone = raw_post("/v1/completions", BODY, headers=f"Authorization: Bearer {KEY}\r\nConnection: close\r\n")
    pair = raw_post(path, body, headers=f"Authorization: Bearer {KEY}\r\nConnection: close\r\n")
    for first, num_open, then in ((pair, 2, ("/v1/completions", BODY)), (alone, 1, (path, body))):
        locked.runner.hold()
        with locked.connect() as connection:
            connection.sendall(first)
            locked.wait(lambda num_open=num_open: locked.server.num_open == num_open)
            status, headers, raw = locked.request("POST", *then, BEARER)
            assert status == 429
            assert headers["Retry-After"] == "1"
            assert json.loads(raw)["error"]["code"] == "too_many_requests"
            locked.runner.release()
            assert read_all(connection).startswith(b"HTTP/1.1 200")
        assert locked.request("POST", path, body, BEARER)[0] == 200, "its places are free again"
        locked.wait_idle()


def test_more_answers_than_a_key_may_ever_have_are_refused_for_good(locked):
    status, headers, raw = locked.request("POST", "/v1/completions", {**BODY, "prompt": ["x"] * 3}, BEARER)
    assert status == 400
    assert "Retry-After" not in headers
    assert "3 answers" in json.loads(raw)["error"]["message"]
    assert locked.request("POST", "/v1/completions", {**BODY, "prompt": ["x"] * 2}, BEARER)[0] == 200


def test_what_is_refused_for_its_key_is_counted_by_its_reason():
    options = ServerOptions(port=0, api_keys=(KEY,), max_requests_per_key=1)
    with RunningServer(options=options) as running:
        running.request("POST", "/v1/completions", BODY)
        running.runner.hold()
        with running.connect() as connection:
            connection.sendall(
                raw_post("/v1/completions", BODY, headers=f"Authorization: Bearer {KEY}\r\n")
            )
            running.wait(lambda: running.server.num_open == 1)
            assert running.request("POST", "/v1/completions", BODY, BEARER)[0] == 429
        _, _, raw = running.request("GET", "/metrics")
        for reason in ("invalid_api_key", "too_many_requests"):
            [line] = [
                line for line in raw.decode().splitlines()
                if line.startswith("jaxserve:admission_rejections_total{") and f'reason="{reason}"' in line
            ]
            assert line.endswith(" 1.0")


def test_a_client_that_leaves_gives_its_place_back(locked):
    locked.runner.hold()
    slow = raw_post("/v1/completions", BODY, headers=f"Authorization: Bearer {KEY}\r\n")
    for _ in range(2):
        with locked.connect() as connection:
            connection.sendall(slow)
            locked.wait(lambda: locked.server.num_open == 1)
        locked.wait(lambda: locked.server.num_open == 0)
    locked.runner.release()
    assert locked.request("POST", "/v1/completions", BODY, BEARER)[0] == 200


def test_a_page_of_an_allowed_origin_may_ask_send_and_read(locked):
    preflight = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    status, headers, _ = locked.request("OPTIONS", "/v1/chat/completions", None, preflight)
    assert status == 204
    assert headers["Access-Control-Allow-Origin"] == ORIGIN
    assert "POST" in headers["Access-Control-Allow-Methods"]
    assert headers["Access-Control-Allow-Headers"] == "authorization,content-type"
    for body in (BODY, {**BODY, "stream": True}, {"prompt": 5}):
        _, headers, _ = locked.request("POST", "/v1/completions", body, {"Origin": ORIGIN, **BEARER})
        assert headers["Access-Control-Allow-Origin"] == ORIGIN
        assert headers["Vary"] == "Origin"
    _, headers, _ = locked.request("POST", "/v1/completions", BODY, {"Origin": ORIGIN})
    assert headers["Access-Control-Allow-Origin"] == ORIGIN, "the page must be able to read the 401"


def test_a_page_of_another_origin_may_not(locked):
    elsewhere = {"Origin": "https://evil.example.org", "Access-Control-Request-Method": "POST"}
    status, headers, _ = locked.request("OPTIONS", "/v1/completions", None, elsewhere)
    assert status == 401
    assert "Access-Control-Allow-Origin" not in headers
    _, headers, _ = locked.request("POST", "/v1/completions", BODY, {**elsewhere, **BEARER})
    assert "Access-Control-Allow-Origin" not in headers


def test_all_origins_are_allowed_by_a_star_and_none_by_default(server):
    _, headers, _ = server.request("GET", "/health", None, {"Origin": ORIGIN})
    assert "Access-Control-Allow-Origin" not in headers
    with RunningServer(options=ServerOptions(port=0, allowed_origins=("*",))) as running:
        _, headers, _ = running.request("GET", "/health", None, {"Origin": ORIGIN})
        assert headers["Access-Control-Allow-Origin"] == "*"


@pytest.mark.parametrize("origin", ["example.org", "https://example.org/", "https://a b", ""])
def test_what_no_browser_sends_as_origin_is_refused_at_start(origin):
    with pytest.raises(ConfigError, match="allowed-origins"):
        RunningServer(options=ServerOptions(port=0, allowed_origins=(origin,))).__enter__()


def test_a_small_body_that_unpacks_to_a_large_one_is_413(locked):
    packed = gzip.compress(b'{"prompt": "' + b"x" * 5_000_000 + b'"}')
    assert len(packed) < 100_000
    status, _, raw = locked.request("POST", "/v1/completions", packed, {"Content-Encoding": "gzip", **BEARER})
    assert status == 413
    assert "--max-body-size" in json.loads(raw)["error"]["message"]


def test_logs_hold_neither_prompts_nor_keys(caplog):
    options = ServerOptions(port=0, api_keys=(KEY,), access_log=True)
    secret = "my-secret-prompt"
    with caplog.at_level(logging.DEBUG), RunningServer(options=options) as running:
        running.request("POST", f"/v1/completions?key={KEY}", {"prompt": secret, "max_tokens": 1}, BEARER)
        running.request("POST", "/v1/completions", {"prompt": secret, "temperature": "x" + secret}, BEARER)
        running.request("POST", "/v1/completions", {"prompt": secret}, {"Authorization": f"Bearer {KEY}x"})
        running.request(
            "POST", "/v1/chat/completions", {"messages": [{"role": secret, "content": secret}]}, BEARER
        )
        with running.connect() as connection:
            connection.sendall(f"GET / HTTP/1.1\r\nAuthorization Bearer {KEY}\r\nbad {KEY}\r\n\r\n".encode())
            read_all(connection)
        running.runner.breaks = True
        running.request("POST", "/v1/completions", {"prompt": secret}, BEARER)
    assert "POST '/v1/completions' 200" in caplog.text
    assert KEY not in caplog.text
    assert secret not in caplog.text
    assert KEY not in repr(options)


def test_bodies_are_logged_when_that_is_asked_for_but_never_keys(caplog):
    options = ServerOptions(port=0, api_keys=(KEY,), log_requests=True)
    with RunningServer(options=options) as running:
        running.request("POST", "/v1/completions", b'{"prompt": "a\\nb",\n"max_tokens": 1}', BEARER)
        running.request("POST", "/v1/completions", {"prompt": "long " * 2000, "max_tokens": 1}, BEARER)
    lines = [record.getMessage() for record in caplog.records if record.name == "jaxserve.requests"]
    assert lines[0] == "POST '/v1/completions' {\"prompt\": \"a\\nb\", \"max_tokens\": 1}"
    assert len(lines) == 2
    assert KEY not in caplog.text


def test_a_small_body_with_costly_fields_is_not_worked_on_in_the_event_loop(server, monkeypatch):
    threads = []
    from jaxserve.server import openai

    real = openai.parse_chat
    monkeypatch.setattr(
        openai, "parse_chat", lambda *args: threads.append(threading.current_thread().name) or real(*args)
    )
    message = {"role": "user", "content": "x"}
    server.post("/v1/chat/completions", {"messages": [message], "max_tokens": 1})
    server.post("/v1/chat/completions", {"messages": [message], "max_tokens": 1, "tools": []})
    server.post(
        "/v1/chat/completions", {"messages": [message], "max_tokens": 1, "chat_template_kwargs": {}}
    )
    assert ["jaxserve-parse" in name for name in threads] == [False, True, True]


def test_the_flags_of_serve_reach_the_server(monkeypatch, tmp_path):
    (tmp_path / "keys").write_text(OTHER + "\n")
    monkeypatch.setenv("JAXSERVE_API_KEY", "sk-third")
    got: list[ServerOptions] = []

    async def serve(options: ServerOptions, load: object, **callbacks: object) -> None:
        got.append(options)

    monkeypatch.setattr("jaxserve.server.lifecycle.serve", serve)
    argv = ["serve", "--api-key", KEY, "--api-key-file", str(tmp_path / "keys")]
    argv += ["--max-requests-per-key", "3", "--max-header-size", "4KiB", "--log-requests"]
    argv += ["--allowed-origins", ORIGIN, "http://localhost:3000"]
    argv += ["--ssl-certfile", str(TLS / "cert.pem"), "--ssl-keyfile", str(TLS / "key.pem")]
    assert main(argv) == 0
    [options] = got
    assert options.api_keys == (KEY, OTHER, "sk-third")
    assert options.max_requests_per_key == 3
    assert options.allowed_origins == (ORIGIN, "http://localhost:3000")
    assert options.max_header_bytes == 4096
    assert options.log_requests
    assert (options.ssl_certfile, options.ssl_keyfile) == (TLS / "cert.pem", TLS / "key.pem")


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.8.8", True), ("::1", True), ("localhost", True), ("0.0.0.0", False),
     ("::", False), ("10.0.0.1", False), ("example.org", False)],
)  # fmt: skip
def test_only_loopback_addresses_count_as_this_machine(host, expected):
    assert is_loopback(host) is expected
