#!/usr/bin/env python3
"""CPU time that HTTP costs per streamed token: the whole server around a device that costs nothing.

Run from the repository's root: `.venv/bin/python scripts/bench_http.py [--streams 64] [--tokens 200]`.

The engine and the server run in this process, the clients in another one. The device answers after
`--step-ms`, so that each turn's tokens are sent by themselves, as from a real model. CPU time is counted, not
wall time: a busy machine changes little but the number of tokens that share a chunk, which is reported. The
engine alone, without a server, is measured too: the difference is what HTTP costs.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import selectors
import socket
import subprocess
import sys
import threading
import time

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.plan import MaskSource, Plan, StepResult
from jaxserve.server.lifecycle import Loaded, Server, ServerOptions
from jaxserve.server.served import ServedModel
from jaxserve.types import Event, Request, SamplingParams

PROMPT = b"The capital of France is "


class BytesTokenizer:
    """An id is a byte."""

    vocab_size, bos_id, eos_id, add_bos, eos_ids = 256, None, None, False, frozenset[int]()

    def encode(self, text: str, *, add_bos: bool = False, parse_special: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: list[int], *, skip_special: bool = True) -> str:
        return bytes(ids).decode(errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id])

    def is_special(self, token_id: int) -> bool:
        return False


class PacedRunner:
    """Letters, `step_s` after they were asked for; waiting costs no CPU time."""

    def __init__(self, step_s: float):
        self._step_s = step_s

    def launch(self, plan: Plan, masks: MaskSource | None = None) -> Plan:
        return plan

    def fetch(self, handle: Plan) -> tuple[StepResult, ...]:
        time.sleep(self._step_s)
        return tuple(
            StepResult(tuple(97 + (row.start * 7 + row.slot) % 26 for row in step.rows))
            for step in handle.steps
        )


def config(num_streams: int, num_tokens: int) -> EngineConfig:
    pages = -(-(len(PROMPT) + num_tokens) // 16) + 1
    return EngineConfig(
        max_model_len=len(PROMPT) + num_tokens, num_pages=1 + num_streams * pages, max_num_seqs=num_streams
    )


def bare(num_streams: int, num_tokens: int, step_s: float) -> float:
    """CPU seconds of the process for the same tokens, delivered to nobody."""
    left, done = [num_streams], threading.Event()

    def deliver(events: list[Event]) -> None:
        left[0] -= sum(event.finish_reason is not None for event in events)
        if not left[0]:
            done.set()

    engine = Engine(
        config(num_streams, num_tokens), PacedRunner(step_s), BytesTokenizer(), deliver=deliver
    )
    engine.start()
    before_s = time.process_time()
    for i in range(num_streams):
        params = SamplingParams(max_tokens=num_tokens)
        engine.submit(Request(str(i), tuple(PROMPT), params, time.monotonic()))
    done.wait()
    took_s = time.process_time() - before_s
    engine.stop()
    return took_s


async def served(num_streams: int, num_tokens: int, step_s: float, path: str) -> tuple[float, float, int]:
    """(CPU seconds of the process, those of the event loop's thread, chunks that clients got)."""
    server = Server(ServerOptions(port=0))
    await server.start()
    limits = config(num_streams, num_tokens)
    engine = Engine(limits, PacedRunner(step_s), BytesTokenizer(), deliver=server.deliver)
    engine.start()
    model = ServedModel(("bench",), BytesTokenizer(), limits.max_model_len, 256, 0)  # type: ignore[arg-type]
    server.attach(Loaded(model, engine))
    client = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--streams", str(num_streams), "--tokens", str(num_tokens),
        "--client", server.url.rpartition(":")[2], "--path", path, stdout=subprocess.PIPE,
    )  # fmt: skip
    assert client.stdout is not None
    await client.stdout.readline()  # the clients are connected
    process_s, thread_s = time.process_time(), time.thread_time()
    num_chunks = int(await client.stdout.readline())
    took = time.process_time() - process_s, time.thread_time() - thread_s
    await client.wait()
    await server.close()
    engine.stop()
    return *took, num_chunks


def be_clients(port: int, num_streams: int, num_tokens: int, path: str) -> None:
    """Open the streams, read them to their ends, and print how many chunks came."""
    selector = selectors.DefaultSelector()
    ends: dict[socket.socket, bytes] = {}
    for _ in range(num_streams):
        connection = socket.create_connection(("127.0.0.1", port))
        selector.register(connection, selectors.EVENT_READ)
        ends[connection] = b""
    print("connected", flush=True)
    body = json.dumps({"prompt": PROMPT.decode(), "max_tokens": num_tokens, "stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    for connection in ends:
        connection.sendall(head.encode() + b"\r\n\r\n" + body)
    num_chunks = 0
    while ends:
        for key, _ in selector.select():
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            received = connection.recv(1 << 16)
            num_chunks += received.count(b"data: {")
            ends[connection] = (ends[connection] + received)[-40:]
            if not received or b"[DONE]" in ends[connection]:
                assert received, "the server hung up"
                selector.unregister(connection)
                del ends[connection]
    print(num_chunks, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=200, help="of each stream")
    parser.add_argument("--step-ms", type=float, default=20.0)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--path", default="/v1/completions")
    parser.add_argument("--client", type=int, metavar="PORT", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.client is not None:
        be_clients(args.client, args.streams, args.tokens, args.path)
        return
    num_tokens, step_s = args.streams * args.tokens, args.step_ms / 1e3
    print(f"{args.streams} streams of {args.tokens} tokens, a step of {args.step_ms:g} ms; CPU µs a token:")
    for _ in range(args.repeat):
        bare_s = bare(args.streams, args.tokens, step_s)
        process_s, loop_s, num_chunks = asyncio.run(served(args.streams, args.tokens, step_s, args.path))
        alone_us, all_us, loop_us = (s / num_tokens * 1e6 for s in (bare_s, process_s, loop_s))
        print(
            f"  engine alone {alone_us:.1f}, with the server {all_us:.1f}: HTTP {all_us - alone_us:.1f} "
            f"(event loop's thread {loop_us:.1f}), {num_tokens / num_chunks:.2f} tokens a chunk"
        )


if __name__ == "__main__":
    main()
