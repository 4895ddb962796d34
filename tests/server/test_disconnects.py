"""A client that leaves frees what it held, wherever its request has come to."""

from __future__ import annotations

import socket
import struct

import pytest

from tests.server.running import RunningServer, raw_post

LONG = {"prompt": "x", "max_tokens": 200}
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 200}


def reset(connection: socket.socket) -> None:
    """Close with a TCP reset instead of a farewell."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    connection.close()


@pytest.mark.parametrize("leave", [socket.socket.close, reset])
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(("path", "body"), [("/v1/completions", LONG), ("/v1/chat/completions", CHAT)])
def test_leaving_a_running_request_frees_its_slot_and_pages(server, path, body, stream, leave):
    before = server.metric("jaxserve:generation_tokens_total")
    server.runner.step_s = 0.02
    connection = server.connect()
    connection.sendall(raw_post(path, {**body, "stream": stream}))
    server.wait(lambda: server.metric("jaxserve:generation_tokens_total") > before + 1)
    assert server.engine.stats().num_running == 1
    leave(connection)
    server.wait_idle(1.0)
    assert server.metric("jaxserve:generation_tokens_total") < before + 100


@pytest.mark.parametrize("stream", [True, False])
def test_leaving_the_queue_frees_the_place(server, stream):
    server.runner.hold()
    connections = [server.connect() for _ in range(8)]  # four run, four wait
    for connection in connections:
        connection.sendall(raw_post("/v1/completions", {**LONG, "stream": stream}))
    server.wait(lambda: server.engine.stats().num_waiting >= 4 and server.server.num_open == 8)
    for connection in connections:
        connection.close()
    server.wait(lambda: server.server.num_open == 0)
    server.runner.release()
    server.wait_idle(1.0)


def test_leaving_with_a_batch_of_prompts_frees_all_of_them(server):
    server.runner.step_s = 0.02
    connection = server.connect()
    connection.sendall(raw_post("/v1/completions", {"prompt": ["a"] * 12, "max_tokens": 200, "stream": True}))
    server.wait(lambda: server.engine.stats().num_running == 4)
    connection.close()
    server.wait_idle(1.0)


def test_the_neighbours_of_one_that_leaves_get_the_answer_they_get_alone(server):
    body = {"prompt": "neighbour", "max_tokens": 60, "seed": 9}
    _, alone = server.post("/v1/completions", body)
    server.runner.step_s = 0.005
    leaving = [server.connect() for _ in range(3)]
    for connection in leaving:
        connection.sendall(raw_post("/v1/completions", {**LONG, "stream": True}))
    staying = server.connect()
    staying.sendall(raw_post("/v1/completions", body, headers="Connection: close\r\n"))
    server.wait(lambda: server.engine.stats().num_running == 4)
    for connection in leaving:
        connection.close()
    received = b""
    while part := staying.recv(1 << 16):
        received += part
    staying.close()
    assert alone["choices"][0]["text"].encode() in received


def test_a_client_that_leaves_is_counted_as_an_abort():
    with RunningServer() as running:
        running.runner.hold()
        connection = running.connect()
        connection.sendall(raw_post("/v1/completions", LONG))
        running.wait(lambda: running.server.num_open == 1)
        connection.close()
        running.wait(lambda: running.server.num_open == 0)
        running.runner.release()
        running.wait_idle()
        _, _, raw = running.request("GET", "/metrics")
        assert b'request_success_total{finished_reason="abort",model_name="fake-model"} 1.0' in raw
