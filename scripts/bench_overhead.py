#!/usr/bin/env python3
"""What HTTP costs of a real model's tokens per second: one engine, asked directly and through the server.

    .venv/bin/python scripts/bench_overhead.py --clients 32

Closed loop, as in bench_serve.py: each client sends one request after another, greedy, prompts that no cache
has seen. Asked directly, the requests come from this process and their events go nowhere. Through the server
they are streamed to clients in a process of their own, on the same machine. Both take turns.
"""

from __future__ import annotations

import argparse
import asyncio
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Sequence

from load_client import Prompts, closed_loop, errors, session
from load_report import show

from jaxserve.commands.model import served_model
from jaxserve.launch import LaunchOptions, LoadedEngine, load_engine
from jaxserve.server.lifecycle import Loaded, Server, ServerOptions
from jaxserve.types import Event, Request, SamplingParams


class Directly:
    """Clients without HTTP."""

    def __init__(self, loaded: LoadedEngine, prompts: Sequence[str], max_tokens: int, clients: int):
        encode, add_bos = loaded.tokenizer.encode, loaded.tokenizer.add_bos
        self._rest = iter([tuple(encode(text, add_bos=add_bos)) for text in prompts])
        self._engine, self._max_tokens = loaded.engine, max_tokens
        self._num_open, self._clients = clients, clients
        self._done = threading.Event()

    def run(self) -> float:
        """Seconds until all requests are answered."""
        began_s = time.perf_counter()
        for _ in range(self._clients):
            self._next()
        self._done.wait()
        return time.perf_counter() - began_s

    def deliver(self, events: list[Event]) -> None:
        for event in events:
            assert event.error is None, event.error
            if event.finish_reason is not None:
                self._next()

    def _next(self) -> None:
        ids = next(self._rest, None)
        if ids is None:
            self._num_open -= 1
            if not self._num_open:
                self._done.set()
            return
        params = SamplingParams(self._max_tokens, temperature=0.0, ignore_eos=True)
        self._engine.submit(Request(str(uuid.uuid4()), ids, params, time.monotonic()))


async def through_the_server(server: Server, args: argparse.Namespace, seed: str) -> float:
    """The same, measured by clients in another process."""
    clients = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--be-clients-of", server.url, "--seed", seed,
        "--clients", str(args.clients), "--rounds", str(args.rounds),
        "--prompt", str(args.prompt), "--output", str(args.output), stdout=subprocess.PIPE,
    )  # fmt: skip
    out, _ = await clients.communicate()
    return float(out)


async def be_clients(url: str, prompts: Sequence[str], max_tokens: int, clients: int) -> None:
    async with session() as http:
        load = await closed_loop(http, url, prompts, max_tokens, clients=clients)
    if problems := errors(load.answers):
        raise SystemExit("\n".join(problems))
    print(load.took_s)


async def measure(args: argparse.Namespace) -> list[list[object]]:
    """The rows of the table."""
    server = Server(ServerOptions(port=0))
    await server.start()
    deliver: list[Callable[[list[Event]], None]] = [server.deliver]
    options = LaunchOptions(args.model, max_num_seqs=max(32, args.clients))
    loaded = load_engine(options, deliver=lambda events: deliver[0](events))
    server.attach(Loaded(served_model(loaded), loaded.engine))
    num_tokens = args.clients * args.rounds * args.output
    rows: list[list[object]] = []
    for turn in range(args.turns):
        directly = Directly(loaded, texts(args, f"direct-{turn}"), args.output, args.clients)
        deliver[0] = directly.deliver
        alone = num_tokens / await asyncio.to_thread(directly.run)
        deliver[0] = server.deliver
        served = num_tokens / await through_the_server(server, args, f"http-{turn}")
        rows.append([turn + 1, f"{alone:.1f}", f"{served:.1f}", f"{100 * (1 - served / alone):.1f} %"])
        print(*rows[-1], sep="  ", file=sys.stderr)
    await server.close()
    loaded.engine.stop()
    return rows


def texts(args: argparse.Namespace, seed: str) -> list[str]:
    prompts = Prompts(seed)
    return [prompts.take(args.prompt) for _ in range(args.clients * args.rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=128, help="words of a prompt (default: %(default)s)")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="requests of a client (default: %(default)s)")
    parser.add_argument("--turns", type=int, default=3, help="of both (default: %(default)s)")
    parser.add_argument("--seed", default="0", help=argparse.SUPPRESS)
    parser.add_argument("--be-clients-of", metavar="URL", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.be_clients_of:
        asyncio.run(be_clients(args.be_clients_of, texts(args, args.seed), args.output, args.clients))
        return
    show(("turn", "engine alone, tokens/s", "over HTTP, tokens/s", "HTTP costs"), asyncio.run(measure(args)))


if __name__ == "__main__":
    main()
