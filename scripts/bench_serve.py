#!/usr/bin/env python3
"""Throughput, time to first token and time between tokens at several numbers of clients.

    .venv/bin/python scripts/bench_serve.py
    .venv/bin/python scripts/bench_serve.py --before ../earlier    # a checkout with a .venv of its own
    .venv/bin/python scripts/bench_serve.py --url http://127.0.0.1:8080

Closed loop: each client sends one streamed completion after another, 128 tokens in and 64 out unless told
otherwise; greedy, end of sequence ignored, random prompts that no cache has seen. With --before both
servers take turns at each level, so that a machine whose speed drifts does so for both.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from load_client import Load, Prompts, closed_loop, complete, errors, percentile, session
from load_report import ms
from load_server import Served, Variant, make_parser, parse, run

COLUMNS = (
    *("clients", "server", "requests", "tokens in", "tokens/s"),
    *("TTFT p50", "TTFT p95", "inter-token p50", "inter-token p95"),
)
SHORT = {"clients": [1, 4], "rounds": 1, "output": 16}


async def measure(args: argparse.Namespace, servers: list[Served]) -> tuple[list[list[object]], list[str]]:
    """The table's rows, and what went wrong."""
    rows: list[list[object]] = []
    problems: list[str] = []
    async with session() as http:
        for server in servers:
            warm = await complete(http, server.url, Prompts("warm up").take(8), 8)
            problems += errors([warm])
        for clients in args.clients:
            for server in servers:
                prompts = Prompts(f"{args.seed}-{clients}-{server.name}")
                texts = [prompts.take(args.prompt) for _ in range(clients * args.rounds)]
                load = await closed_loop(http, server.url, texts, args.output, clients=clients)
                rows.append(row(clients, server.name, load))
                print(*rows[-1], sep="  ", file=sys.stderr)
                problems += errors(load.answers)
    return rows, problems


def row(clients: int, name: str, load: Load) -> list[object]:
    ttfts, gaps = load.ttfts_s(), load.gaps_s()
    num_prompt = sum(a.num_prompt for a in load.done) / max(1, len(load.done))
    times = [ms(percentile(values, share)) for values in (ttfts, gaps) for share in (0.5, 0.95)]
    return [clients, name, len(load.done), f"{num_prompt:.0f}", f"{load.tokens_per_s:.1f}", *times]


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--before", type=Path, metavar="DIR", help="serve that checkout as well")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 64], help="(default: 1 8 32 64)")
    parser.add_argument("--prompt", type=int, default=128, help="words of a prompt (default: %(default)s)")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=2, help="requests of a client (default: %(default)s)")
    parser.add_argument("--seed", default="0", help="of the prompts (default: %(default)s)")
    args = parse(parser, argv, SHORT)
    flags = tuple(args.serve_flags)
    variants = [Variant("after" if args.before else "this", flags)]
    if args.before:
        variants.insert(0, Variant("before", flags, args.before.resolve()))
    return run(args, variants, measure, COLUMNS)


if __name__ == "__main__":
    raise SystemExit(main())
