from __future__ import annotations

import asyncio
import json
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError
from jaxserve.server.lifecycle import Server, ServerOptions, in_thread
from tests.server.running import RunningServer, raw_post

ROOT = Path(__file__).parent.parent.parent


def read_all(connection: socket.socket) -> bytes:
    received = b""
    while part := connection.recv(1 << 16):
        received += part
    return received


def test_while_the_model_loads_health_is_503_and_says_so():
    with RunningServer(attach=False) as running:
        for path in ("/health", "/v1/models", "/metrics"):
            status, body = running.get(path)
            assert status == 503
            assert "loading" in body["error"]["message"]
        status, headers, _ = running.request("POST", "/v1/completions", {"prompt": "x"})
        assert status == 503
        assert int(headers["Retry-After"]) > 0
        running.attach()
        assert running.get("/health") == (200, None)
        assert running.post("/v1/completions", {"prompt": "x"})[0] == 200


@pytest.mark.parametrize(
    ("host", "text"),
    [("no.such.host.invalid", "no address"), ("203.0.113.7", "no address of this machine")],
)
def test_a_host_that_is_not_ours_is_one_clear_error(host, text):
    async def start() -> None:
        await Server(ServerOptions(host=host, port=0)).start()

    with pytest.raises(ConfigError, match=text):
        asyncio.run(start())


def test_a_port_in_use_is_one_clear_error():
    async def start(port: int) -> None:
        await Server(ServerOptions(port=port)).start()

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(ConfigError, match="in use by another process: pass another --port"):
            asyncio.run(start(taken.getsockname()[1]))


def test_draining_lets_running_requests_end_and_refuses_new_ones():
    with RunningServer() as running:
        running.runner.step_s = 0.02
        connections = [running.connect() for _ in range(2)]
        for connection, stream in zip(connections, (True, False)):
            body = {"prompt": "x", "max_tokens": 15, "stream": stream}
            connection.sendall(raw_post("/v1/completions", body, headers="Connection: close\r\n"))
        running.wait(lambda: running.engine.stats().num_running == 2)
        draining = asyncio.run_coroutine_threadsafe(running.server.drain(), running._loop)
        running.wait(lambda: running.get("/health")[0] == 503)
        status, body = running.post("/v1/completions", {"prompt": "y"})
        assert (status, body["error"]["code"]) == (503, "unavailable")
        streamed, whole = map(read_all, connections)
        draining.result(10)
        assert streamed.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert b"error" not in streamed
        assert whole.startswith(b"HTTP/1.1 200")


def test_what_can_not_end_within_the_timeout_is_told():
    options = ServerOptions(port=0, shutdown_timeout_s=0.2)
    with RunningServer(options=options) as running:
        running.runner.step_s = 0.05
        connections = [running.connect() for _ in range(2)]
        for connection, stream in zip(connections, (True, False)):
            body = {"prompt": "x", "max_tokens": 200, "stream": stream}
            connection.sendall(raw_post("/v1/completions", body, headers="Connection: close\r\n"))
        running.wait(lambda: running.engine.stats().num_running == 2)
        time.sleep(0.1)
        began_s = time.monotonic()
        running.call(running.server.drain)
        assert time.monotonic() - began_s < 2
        streamed, whole = map(read_all, connections)
        assert whole.startswith(b"HTTP/1.1 503")
        assert b"shutting down" in whole
        events = [line[6:] for line in streamed.splitlines() if line.startswith(b"data: ")]
        assert events[-1] == b"[DONE]"
        assert "shutting down" in json.loads(events[-2])["error"]["message"]


def test_an_engine_that_hangs_does_not_hold_up_the_exit(monkeypatch):
    monkeypatch.setattr("jaxserve.server.lifecycle.ENGINE_GRACE_S", 0.2)
    with RunningServer(options=ServerOptions(port=0, shutdown_timeout_s=0.1)) as running:
        running.runner.hold()
        connection = running.connect()
        connection.sendall(raw_post("/v1/completions", {"prompt": "x"}, headers="Connection: close\r\n"))
        running.wait(lambda: running.server.num_open == 1)
        began_s = time.monotonic()
        running.call(running.server.drain)
        assert time.monotonic() - began_s < 2
        assert read_all(connection).startswith(b"HTTP/1.1 503")


def test_a_dead_engine_is_noticed_even_if_it_says_nothing(monkeypatch):
    monkeypatch.setattr("jaxserve.server.lifecycle.WATCH_INTERVAL_S", 0.02)
    with RunningServer() as running:
        running.runner.hold()
        connection = running.connect()
        connection.sendall(raw_post("/v1/completions", {"prompt": "x"}, headers="Connection: close\r\n"))
        running.wait(lambda: running.server.num_open == 1)
        running.engine._intake.close("the thread was lost")
        assert read_all(connection).startswith(b"HTTP/1.1 500")
        status, body = running.get("/health")
        assert (status, body["error"]["type"]) == (503, "service_unavailable")


def test_what_runs_in_a_thread_gives_its_result_or_its_error():
    def fail() -> None:
        raise ZeroDivisionError("no")

    async def run() -> None:
        assert await in_thread(max, 3, 4) == 4
        with pytest.raises(ZeroDivisionError):
            await in_thread(fail)

    asyncio.run(run())


PROGRAM = textwrap.dedent(
    """
    import asyncio, sys, time
    sys.path.insert(0, {root!r})
    from jaxserve.engine.engine import Engine
    from jaxserve.errors import JaxserveError
    from jaxserve.server.lifecycle import Loaded, ServerOptions, serve
    from tests.server.running import CONFIG, PacedRunner, served_model

    def load(deliver):
        time.sleep({load_s})
        model, runner = served_model(), PacedRunner(CONFIG)
        runner.step_s = 0.05
        if {breaks_after_s}:
            import threading
            threading.Timer({breaks_after_s}, setattr, (runner, "breaks", True)).start()
        engine = Engine(CONFIG, runner, model.tokenizer, deliver=deliver)
        engine.start()
        return Loaded(model, engine)

    def on_ready(url, model):
        print(url, flush=True)

    options = ServerOptions(port=0, shutdown_timeout_s={timeout_s})
    print("begun", flush=True)
    try:
        asyncio.run(serve(options, load, on_ready=on_ready))
    except JaxserveError as error:
        print(error)
        raise SystemExit(7)
    print("clean")
    """
)


def start(
    timeout_s: float = 5.0, load_s: float = 0.0, breaks_after_s: float = 0.0
) -> tuple[subprocess.Popen[str], str]:
    """A server in a process of its own, and what it said last: its URL once it is ready."""
    program = PROGRAM.format(
        root=str(ROOT), timeout_s=timeout_s, load_s=load_s, breaks_after_s=breaks_after_s
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    line = process.stdout.readline()
    return process, line if load_s else process.stdout.readline().strip()


def begin_stream(url: str, max_tokens: int) -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), timeout=10)
    body = {"prompt": "x", "max_tokens": max_tokens, "stream": True}
    connection.sendall(raw_post("/v1/completions", body, headers="Connection: close\r\n"))
    assert connection.recv(20).startswith(b"HTTP/1.1 200")
    return connection


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_the_stream_end_and_exits_cleanly(number):
    process, url = start()
    with begin_stream(url, max_tokens=12) as connection:
        process.send_signal(number)
        assert read_all(connection).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out, err) == (0, "clean\n", "")


def test_a_second_signal_exits_at_once():
    process, url = start(timeout_s=60)
    with begin_stream(url, max_tokens=200):
        process.send_signal(signal.SIGINT)
        time.sleep(0.2)
        assert process.poll() is None
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=2)
    assert process.returncode == 130


def test_a_signal_while_the_model_loads_does_not_wait_for_it():
    process, _ = start(load_s=20)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=5)
    assert (process.returncode, out) == (7, "stopped while the model was loading\n")


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_dies_tells_its_clients_flips_health_and_ends_the_process(stream):
    process, url = start(breaks_after_s=0.7)
    port = int(url.rpartition(":")[2])
    began_s = time.monotonic()
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        body = {"prompt": "x", "max_tokens": 200, "stream": stream}
        connection.sendall(raw_post("/v1/completions", body, headers="Connection: close\r\n"))
        answer = read_all(connection)
    if stream:
        assert answer.startswith(b"HTTP/1.1 200")
        assert b"server_error" in answer
        assert answer.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    else:
        assert answer.startswith(b"HTTP/1.1 500")
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert read_all(connection).startswith(b"HTTP/1.1 503")
    out, err = process.communicate(timeout=10)
    assert process.returncode == 7
    assert "the device is on fire" in out
    assert "start the server again" in out
    assert "the engine is dead" in err
    assert time.monotonic() - began_s < 8
