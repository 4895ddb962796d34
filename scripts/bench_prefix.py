#!/usr/bin/env python3
"""A system prompt that everybody shares: first tokens and throughput, with the prefix cache and without.

    .venv/bin/python scripts/bench_prefix.py

First, on a quiet server: a question behind a system prompt of 1,000 tokens that nobody has sent before, then
another question behind the same one, in turns on both servers, with a new system prompt in each round. Then a
closed loop of clients whose prompts all share one system prompt, each with a question of its own.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from load_client import Prompts, closed_loop, complete, errors, percentile, session
from load_report import ms, ratio
from load_server import Served, Variant, make_parser, parse, run

COLUMNS = (
    *("prefix cache", "TTFT 1st p50", "TTFT 2nd p50", "2nd / 1st", "cached of a prompt"),
    *("tokens/s", "TTFT p50", "TTFT p95", "inter-token p95", "cached in all"),
)
SHORT = {"rounds": 2, "clients": 4, "requests": 8, "output": 8}


async def measure(args: argparse.Namespace, servers: list[Served]) -> tuple[list[list[object]], list[str]]:
    """The table's rows, and what went wrong."""
    problems: list[str] = []
    rows: list[list[object]] = []
    async with session() as http:
        pairs: list[list[tuple]] = [[] for _ in servers]
        for number in range(-1, args.rounds):
            for server, measured in zip(servers, pairs):
                prompts = Prompts(f"{args.seed}-{number}-{server.name}")
                system = prompts.take(args.system)
                pair = [
                    await complete(http, server.url, prompts.take(args.question, after=system), 1)
                    for _ in range(2)
                ]
                problems += errors(pair)
                if number >= 0 and not problems:  # the first pair warms the server up
                    measured.append(tuple(pair))
        for server, measured in zip(servers, pairs):
            first, second = (percentile((p[i].ttft_s or 0 for p in measured), 0.5) for i in (0, 1))
            cached = sorted({f"{p[1].num_cached} of {p[1].num_prompt}" for p in measured})
            prompts = Prompts(f"{args.seed}-{server.name}")
            system = prompts.take(args.system)
            problems += errors([await complete(http, server.url, system, 1)])
            texts = [prompts.take(args.question, after=system) for _ in range(args.requests)]
            load = await closed_loop(http, server.url, texts, args.output, clients=args.clients)
            problems += errors(load.answers)
            share = ratio(sum(a.num_cached for a in load.done), sum(a.num_prompt for a in load.done))
            rows.append([
                server.name, ms(first), ms(second), ratio(second, first), ", ".join(cached),
                f"{load.tokens_per_s:.1f}", ms(percentile(load.ttfts_s(), 0.5)),
                ms(percentile(load.ttfts_s(), 0.95)), ms(percentile(load.gaps_s(), 0.95)), share,
            ])  # fmt: skip
            print(*rows[-1], sep="  ", file=sys.stderr)
    return rows, problems


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--system", type=int, default=1000, help="words of it (default: %(default)s)")
    parser.add_argument("--question", type=int, default=20, help="words of one (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=7, help="system prompts (default: %(default)s)")
    parser.add_argument("--clients", type=int, default=8, help="of the closed loop (default: %(default)s)")
    parser.add_argument("--requests", type=int, default=48, help="of all clients (default: %(default)s)")
    parser.add_argument("--output", type=int, default=64, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--seed", default="0", help="of the prompts (default: %(default)s)")
    args = parse(parser, argv, SHORT)
    flags = tuple(args.serve_flags)
    variants = [Variant("off", (*flags, "--no-enable-prefix-caching")), Variant("on", flags)]
    return run(args, variants, measure, COLUMNS)


if __name__ == "__main__":
    raise SystemExit(main())
