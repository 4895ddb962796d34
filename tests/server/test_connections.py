"""Connections: TLS, and clients that are slow, silent or never read."""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError
from jaxserve.server.http import Connection
from jaxserve.server.lifecycle import ServerOptions
from jaxserve.server.tls import ssl_context
from tests.server.running import RunningServer, raw_post
from tests.server.test_raw_sockets import read_all

TLS = Path(__file__).parents[1] / "data" / "tls"
BODY = {"prompt": "x", "max_tokens": 2}


def test_the_server_speaks_tls_with_the_certificate_it_was_given():
    options = ServerOptions(port=0, ssl_certfile=TLS / "cert.pem", ssl_keyfile=TLS / "key.pem")
    trusting = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
    with RunningServer(options=options) as running:
        assert running.url.startswith("https://")
        with running.connect() as plain, trusting.wrap_socket(plain, server_hostname="localhost") as secure:
            body = {**BODY, "stream": True}
            secure.sendall(raw_post("/v1/completions", body, headers="Connection: close\r\n"))
            assert b"data: [DONE]\n\n" in read_all(secure)
        with running.connect() as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert not read_all(plain).startswith(b"HTTP")


def test_tls_streams_end_every_time():
    # TLS transports of asyncio pause their protocol when as many bytes wait as the limit says: also none.
    options = ServerOptions(port=0, ssl_certfile=TLS / "cert.pem", ssl_keyfile=TLS / "key.pem")
    trusting = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
    post = raw_post("/v1/completions", {**BODY, "stream": True}, headers="Connection: close\r\n")
    limits = []
    with RunningServer(options=options) as running, pytest.MonkeyPatch.context() as patch:
        made = Connection.connection_made

        def note_limits(self: Connection, transport: asyncio.Transport) -> None:
            made(self, transport)
            limits.append(transport.get_write_buffer_limits())

        patch.setattr(Connection, "connection_made", note_limits)
        for _ in range(10):
            plain = running.connect()
            with plain, trusting.wrap_socket(plain, server_hostname="localhost") as secure:
                secure.sendall(post)
                assert read_all(secure).endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
    assert limits == [(0, 1)] * 10


def test_certificates_that_can_not_be_used_are_refused_at_start(tmp_path):
    with pytest.raises(ConfigError, match="--ssl-certfile"):
        ssl_context(None, TLS / "key.pem")
    with pytest.raises(ConfigError, match="can't be read"):
        ssl_context(tmp_path / "missing.pem", None)
    with pytest.raises(ConfigError, match="private key"):
        ssl_context(TLS / "cert.pem", None)
    (tmp_path / "other.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match="private key"):
        ssl_context(tmp_path / "other.pem", TLS / "key.pem")


def test_headers_longer_than_the_limit_are_400():
    with RunningServer(options=ServerOptions(port=0, max_header_bytes=300)) as running:
        assert running.request("GET", "/health", None, {"X-A": "a" * 200})[0] == 200
        assert running.request("GET", "/health", None, {"X-A": "a" * 400})[0] == 400
        assert running.request("GET", "/" + "a" * 400)[0] == 400


def test_headers_that_come_too_slowly_are_given_up(server, monkeypatch):
    monkeypatch.setattr("jaxserve.server.http.HEADER_TIMEOUT_S", 0.2)
    with server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        for _ in range(1000):  # a byte now and then buys no more time
            try:
                connection.sendall(b"X")
            except OSError:
                break
            time.sleep(0.01)
        else:
            raise AssertionError("the connection is still open")
    with server.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n")
        answer = read_all(connection)
    assert answer.startswith(b"HTTP/1.1 408")
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"


def test_a_connection_that_asks_for_nothing_is_closed(server, monkeypatch):
    monkeypatch.setattr("jaxserve.server.http.KEEPALIVE_TIMEOUT_S", 0.2)
    with server.connect() as silent, server.connect() as served:
        served.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert served.recv(1000).startswith(b"HTTP/1.1 200")
        assert read_all(silent) == b""
        assert read_all(served) == b""


def test_a_slow_header_does_not_cut_off_an_answer_under_way(server, monkeypatch):
    monkeypatch.setattr("jaxserve.server.http.HEADER_TIMEOUT_S", 0.2)
    server.runner.hold()
    with server.connect() as connection:
        request = raw_post("/v1/completions", BODY, headers="Connection: close\r\n")
        connection.sendall(request[:20])
        connection.sendall(request[20:])
        time.sleep(0.5)
        server.runner.release()
        assert read_all(connection).startswith(b"HTTP/1.1 200")


def test_a_client_that_never_reads_loses_its_connection_and_frees_its_slot(monkeypatch):
    monkeypatch.setattr("jaxserve.server.http.SEND_TIMEOUT_S", 0.2)
    with RunningServer() as running:
        connection = socket.socket()  # for which the kernel holds so little that the stream soon waits
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1)
        connection.connect(("127.0.0.1", running.port))
        shrink_send_buffers(running)
        running.runner.step_s = 0.01
        body = {"prompt": "x", "max_tokens": 250, "stream": True, "stream_options": {"include_usage": True}}
        connection.sendall(raw_post("/v1/completions", body))
        running.wait(lambda: running.server.num_open == 1)
        running.wait(lambda: num_connections(running) == 0, timeout_s=20)
        running.wait_idle()
        connection.close()


def num_connections(running: RunningServer) -> int:
    http_server = running.server._runner.server
    assert http_server is not None
    return len(http_server.connections)


def shrink_send_buffers(running: RunningServer) -> None:
    """Of the connections that the server has."""
    running.wait(lambda: num_connections(running) == 1)

    async def shrink() -> None:
        http_server = running.server._runner.server
        assert http_server is not None
        for connection in http_server.connections:
            raw = connection.transport.get_extra_info("socket")  # type: ignore[union-attr]
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)

    running.call(shrink)
