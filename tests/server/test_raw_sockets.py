"""What arrives on a port that is open to the world."""

from __future__ import annotations

import json
import random
import socket
import time

import pytest

from tests.server.running import RunningServer, raw_post

BODY = {"prompt": "x", "max_tokens": 2}


def read_all(connection: socket.socket) -> bytes:
    received = b""
    try:
        while part := connection.recv(1 << 16):
            received += part
    except ConnectionError:
        pass
    return received


def still_serves(server: RunningServer) -> bool:
    return server.post("/v1/completions", BODY)[0] == 200


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(range(200)),  # a TLS hello
        b"GARBAGE\r\n\r\n",
        b"\0" * 5000 + b"\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /health HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"GET /health HTTP/1.1\r\nHost: x\r\nbroken header\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX-Long: " + b"a" * 100_000 + b"\r\n\r\n",
        b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(1000)) + b"\r\n",
    ],
)
def test_broken_http_is_a_400_in_json_and_the_connection_ends(server, garbage):
    with server.connect() as connection:
        connection.sendall(garbage)
        received = read_all(connection)
    head, _, body = received.partition(b"\r\n\r\n")
    assert head.split()[1] == b"400"
    error = json.loads(body)["error"]
    assert error["type"] == "invalid_request_error"
    assert len(error["message"]) < 400
    assert still_serves(server)


CHUNKED = (
    b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)


def test_broken_chunks_in_a_body_are_a_400(server):
    with server.connect() as connection:
        connection.sendall(CHUNKED + b"nothex\r\n")
        received = read_all(connection)
    assert received.split()[1] == b"400"
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["type"] == "invalid_request_error"
    assert still_serves(server)


def test_a_body_that_breaks_after_it_began_well_is_given_up(server, monkeypatch):
    monkeypatch.setattr("jaxserve.server.http.BODY_TIMEOUT_S", 0.2)
    monkeypatch.setattr("jaxserve.server.http.LINGER_S", 0.1)
    with server.connect() as connection:
        connection.sendall(CHUNKED + b"2\r\n{ \r\n")
        time.sleep(0.05)
        connection.sendall(b"nothex\r\n")
        assert read_all(connection).split()[1] in (b"400", b"408")
    assert still_serves(server)


@pytest.mark.parametrize("part", [1, 20, 90, 140])
def test_half_a_request_and_a_closed_connection_leave_nothing(server, part):
    with server.connect() as connection:
        connection.sendall(raw_post("/v1/completions", {**BODY, "max_tokens": 100})[:part])
    assert still_serves(server)


def test_a_body_that_comes_byte_by_byte_is_understood(server):
    with server.connect() as connection:
        for byte in raw_post("/v1/completions", BODY, headers="Connection: close\r\n"):
            connection.sendall(bytes([byte]))
        assert read_all(connection).startswith(b"HTTP/1.1 200")


def test_a_body_that_never_comes_is_given_up(server, monkeypatch):
    monkeypatch.setattr("jaxserve.server.http.BODY_TIMEOUT_S", 0.1)
    monkeypatch.setattr("jaxserve.server.http.LINGER_S", 0.1)
    with server.connect() as connection:
        connection.sendall(raw_post("/v1/completions", BODY)[:-5])
        received = read_all(connection)
    assert received.startswith(b"HTTP/1.1 408")
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == "request_timeout"


def test_requests_on_one_connection_are_answered_in_order(server):
    with server.connect() as connection:
        connection.sendall(
            raw_post("/v1/completions", {**BODY, "max_tokens": 3})
            + raw_post("/v1/completions", {"prompt": ""})
            + raw_post("/v1/completions", BODY, headers="Connection: close\r\n")
        )
        received = read_all(connection)
    assert [answer.split()[0] for answer in received.split(b"HTTP/1.1")[1:]] == [b"200", b"400", b"200"]


def test_expecting_100_continue_works_and_other_expectations_do_not(server):
    with server.connect() as connection:
        head, _, body = raw_post(
            "/v1/completions", BODY, headers="Expect: 100-continue\r\nConnection: close\r\n"
        ).partition(b"\r\n\r\n")
        connection.sendall(head + b"\r\n\r\n")
        assert connection.recv(100) == b"HTTP/1.1 100 Continue\r\n\r\n"
        connection.sendall(body)
        assert read_all(connection).startswith(b"HTTP/1.1 200")
    status, _, raw = server.request("POST", "/v1/completions", BODY, {"Expect": "a miracle"})
    assert status == 417
    assert json.loads(raw)["error"]["code"] == "expectation_failed"


def test_an_http_1_0_client_gets_its_stream_without_chunk_headers(server):
    with server.connect() as connection:
        request = raw_post("/v1/completions", {**BODY, "stream": True}).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
        connection.sendall(request)
        head, _, body = read_all(connection).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    assert body.startswith(b"data: {")
    assert body.endswith(b"data: [DONE]\n\n")


def test_hundreds_of_idle_connections_do_not_keep_others_out(server):
    idle = [server.connect() for _ in range(300)]
    assert still_serves(server)
    for connection in idle:
        connection.close()


def test_many_clients_at_once_all_get_their_answers(server):
    connections = [server.connect() for _ in range(60)]
    for i, connection in enumerate(connections):
        body = {"prompt": "x" * (i + 1), "max_tokens": 5, "stream": i % 2 == 0}
        connection.sendall(raw_post("/v1/completions", body, headers="Connection: close\r\n"))
    for connection in connections:
        assert read_all(connection).startswith(b"HTTP/1.1 200")
        connection.close()


def test_random_bytes_after_a_good_start_never_stop_the_server(server):
    rng = random.Random(0)
    good = raw_post("/v1/completions", BODY)
    for _ in range(40):
        broken = bytearray(good)
        for _ in range(rng.randint(1, 6)):
            broken[rng.randrange(len(broken))] = rng.randrange(256)
        with server.connect() as connection:
            connection.sendall(bytes(broken))
            connection.shutdown(socket.SHUT_WR)
            read_all(connection)
    assert still_serves(server)
