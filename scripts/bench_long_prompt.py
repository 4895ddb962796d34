#!/usr/bin/env python3
"""Running streams while a long prompt comes in: what chunks of several sizes do to their time between tokens.

    .venv/bin/python scripts/bench_long_prompt.py
    .venv/bin/python scripts/bench_long_prompt.py --chunks 128 512 off

Eight streams decode; once all of them run, a prompt of 4,000 tokens is sent. The gaps between their tokens
that overlap its time to first token are compared with those before. "off" is a chunk as long as the prompt.
"A chunk alone" is the time to first token of a prompt of one chunk on an idle server: a stream waits for
about that, and for a little more where the chunk has much context to look at.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field

import aiohttp
from load_client import Answer, Prompts, complete, errors, percentile, session
from load_report import ms
from load_server import Served, Variant, make_parser, parse, run

COLUMNS = (
    *("chunk", "prompt", "TTFT of it p50", "a chunk alone p50", "inter-token before p50", "before p95"),
    *("meanwhile p50", "meanwhile p95", "longest"),
)
SHORT = {"streams": 2, "prompt": 200, "chunks": ["64", "off"], "rounds": 1}
WARM_TOKENS = 16  # of every stream before the prompt is sent
FOLLOW_LIMIT_S = 600
ENDED_EARLY = "a stream ended before the prompt was done: raise --output"


@dataclass
class Measured:
    """Of all rounds on one server, in seconds."""

    ttfts: list[float] = field(default_factory=list)
    chunk_ttfts: list[float] = field(default_factory=list)
    before: list[float] = field(default_factory=list)
    meanwhile: list[float] = field(default_factory=list)
    num_prompt: int = 0


async def measure(args: argparse.Namespace, servers: list[Served]) -> tuple[list[list[object]], list[str]]:
    """The table's rows, and what went wrong."""
    problems: list[str] = []
    results = [Measured() for _ in servers]
    async with session() as http:
        for number in range(args.rounds):
            for server, measured in zip(servers, results):
                prompts = Prompts(f"{args.seed}-{number}-{server.name}")
                if server.name.isdecimal():
                    chunk = await complete(http, server.url, prompts.take(int(server.name)), 1)
                    problems += errors([chunk])
                    measured.chunk_ttfts += [] if chunk.ttft_s is None else [chunk.ttft_s]
                problems += await one_round(http, server.url, args, prompts, measured)
                print(f"chunk {server.name}: round {number + 1} of {args.rounds}", file=sys.stderr)
    rows: list[list[object]] = []
    for server, measured in zip(servers, results):
        before, meanwhile = (
            [ms(percentile(gaps, share)) for share in (0.5, 0.95)]
            for gaps in (measured.before, measured.meanwhile)
        )
        rows.append([
            server.name, measured.num_prompt, ms(percentile(measured.ttfts, 0.5)),
            ms(percentile(measured.chunk_ttfts, 0.5)), *before, *meanwhile,
            ms(percentile(measured.meanwhile, 1)),
        ])  # fmt: skip
    return rows, problems


async def one_round(
    http: aiohttp.ClientSession, url: str, args: argparse.Namespace, prompts: Prompts, measured: Measured
) -> list[str]:
    """Add what one long prompt does to the streams to `measured`; returns what went wrong."""
    streams = [Answer() for _ in range(args.streams)]
    tasks = [
        asyncio.create_task(complete(http, url, prompts.take(32), args.output, answer)) for answer in streams
    ]
    try:
        async with asyncio.timeout(FOLLOW_LIMIT_S):
            while any(len(answer.token_times_s) < WARM_TOKENS for answer in streams):
                if any(task.done() for task in tasks):
                    return [*errors(streams), ENDED_EARLY]
                await asyncio.sleep(0.005)
            prompt = await complete(http, url, prompts.take(args.prompt), 1)
            while not prompt.error and any(a.token_times_s[-1] < prompt.ended_s for a in streams):
                if any(task.done() for task in tasks):
                    return [*errors(streams), ENDED_EARLY]
                await asyncio.sleep(0.005)
    except TimeoutError:
        return [f"the streams stood still for {FOLLOW_LIMIT_S} s"]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    problems = errors([*streams, prompt])
    if not problems and prompt.ttft_s is not None:
        first_s = prompt.sent_s + prompt.ttft_s
        measured.num_prompt = prompt.num_prompt
        measured.ttfts.append(prompt.ttft_s)
        all_run_s = max(answer.token_times_s[2] for answer in streams)  # nobody is in prefill any more
        gaps = [gap for answer in streams for gap in answer.gaps]
        measured.before += [b - a for a, b in gaps if a >= all_run_s and b <= prompt.sent_s]
        measured.meanwhile += [b - a for a, b in gaps if b > prompt.sent_s and a < first_s]
    return problems


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--streams", type=int, default=8, help="that decode (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=4000, help="words of it (default: %(default)s)")
    parser.add_argument(
        "--chunks", nargs="+", default=["128", "512", "off"],
        help="tokens of a chunk, a server for each; off: the whole prompt (default: 128 512 off)",
    )  # fmt: skip
    parser.add_argument("--output", type=int, default=1024, help="tokens of a stream (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="long prompts a server (default: %(default)s)")
    parser.add_argument("--seed", default="0", help="of the prompts (default: %(default)s)")
    args = parse(parser, argv, SHORT)
    whole = 1 << (args.prompt - 1).bit_length()
    slots = args.streams + 1
    variants = [
        Variant(chunk, (
            "--max-num-batched-tokens", str(whole if chunk == "off" else chunk),
            "--max-num-seqs", str(slots), *args.serve_flags,
        ))
        for chunk in args.chunks
    ]  # fmt: skip
    return run(args, variants, measure, COLUMNS)


if __name__ == "__main__":
    raise SystemExit(main())
