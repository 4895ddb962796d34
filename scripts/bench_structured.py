#!/usr/bin/env python3
"""What one stream that follows a JSON Schema costs its neighbours.

    .venv/bin/python scripts/bench_structured.py
    .venv/bin/python scripts/bench_structured.py --url http://127.0.0.1:8080 --streams 8

Rounds take turns: all streams are free, or one of them is held to a schema for as long as the others run.
What is compared is the tokens per second of the streams that are free in both, at the median of the rounds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from statistics import median

import aiohttp
from load_client import Answer, Prompts, complete, errors, percentile, session
from load_report import ms, ratio
from load_server import Served, ServerError, Variant, make_parser, parse, run

COLUMNS = ("streams", "held to a schema", "tokens/s of the free", "of all free", "inter-token p50", "p95")
SHORT = {"streams": 4, "rounds": 1, "output": 16}
SCHEMA = {
    "type": "array",
    "items": {
        "type": "object",
        "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array"}},
        "required": ["name", "age", "tags"],
    },
    "minItems": 1000,  # longer than the round
}


async def hold(http: aiohttp.ClientSession, url: str, max_tokens: int) -> None:
    """One answer after another that follows the schema, until it is cancelled."""
    body = {
        "prompt": "People:", "max_tokens": max_tokens, "temperature": 0, "stream": True,
        "structured_outputs": {"json": SCHEMA},
    }  # fmt: skip
    while True:
        async with http.post(url + "/v1/completions", json=body) as response:
            text = await response.text()
            if response.status != 200 or '"error"' in text:
                raise ServerError(f"the answer by a schema failed: HTTP {response.status}: {text[:200]}")


async def one_round(
    http: aiohttp.ClientSession, url: str, prompts: list[str], max_tokens: int, *, held: bool
) -> tuple[list[Answer], float]:
    """The answers to all prompts but the last, and how long they took together."""
    last: asyncio.Future = asyncio.ensure_future(
        hold(http, url, max_tokens) if held else complete(http, url, prompts[-1], max_tokens)
    )
    began_s = time.perf_counter()
    free = asyncio.gather(*(complete(http, url, prompt, max_tokens) for prompt in prompts[:-1]))
    await asyncio.wait([free, last], return_when=asyncio.FIRST_COMPLETED if held else asyncio.ALL_COMPLETED)
    if held and last.done():
        await last  # raises what went wrong
    answers = await free
    took_s = max(answer.ended_s for answer in answers) - began_s
    last.cancel()
    with suppress(asyncio.CancelledError):
        await last
    return list(answers), took_s


async def measure(args: argparse.Namespace, servers: list[Served]) -> tuple[list[list[object]], list[str]]:
    """The table's rows, and what went wrong."""
    [server] = servers
    speeds: dict[bool, list[float]] = {False: [], True: []}
    gaps: dict[bool, list[float]] = {False: [], True: []}
    problems: list[str] = []
    prompts = Prompts(args.seed)
    async with session() as http:
        for held in (False, True):  # the grammar is compiled, the vocabulary read
            await one_round(http, server.url, [prompts.take(8) for _ in range(2)], 8, held=held)
        for _ in range(args.rounds):
            for held in (False, True):
                texts = [prompts.take(args.prompt) for _ in range(args.streams)]
                answers, took_s = await one_round(http, server.url, texts, args.output, held=held)
                problems += errors(answers)
                speeds[held].append(sum(answer.num_output for answer in answers) / took_s)
                gaps[held] += [end - begin for answer in answers for begin, end in answer.gaps]
                print(json.dumps({"held": held, "tokens_per_s": speeds[held][-1]}), file=sys.stderr)
    base = median(speeds[False])
    rows: list[list[object]] = []
    for held in (False, True):
        speed, times = median(speeds[held]), [ms(percentile(gaps[held], share)) for share in (0.5, 0.95)]
        rows.append([args.streams, int(held), f"{speed:.1f}", ratio(speed, base), *times])
    return rows, problems


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--streams", type=int, default=8, help="at the same time (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=64, help="words of a prompt (default: %(default)s)")
    parser.add_argument("--output", type=int, default=128, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of each kind (default: %(default)s)")
    parser.add_argument("--seed", default="0", help="of the prompts (default: %(default)s)")
    args = parse(parser, argv, SHORT)
    return run(args, [Variant("this", tuple(args.serve_flags))], measure, COLUMNS)


if __name__ == "__main__":
    raise SystemExit(main())
