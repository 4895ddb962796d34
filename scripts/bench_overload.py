#!/usr/bin/env python3
"""Three times the requests that the server can answer, for two minutes: goodput, refusals, errors, memory.

    .venv/bin/python scripts/bench_overload.py

First the capacity is measured with as many clients as there are slots. Then requests arrive at three times
that pace, at random times and whatever becomes of those before; none is sent again. Lengths vary, the queue
is short and pages are scarce, so that requests are queued, refused and preempted. The same for both ways to
admit.

Goodput counts the tokens of full answers that ended while requests arrived. Fails on anything but full
answers and 429 with Retry-After, on memory that grows, and when the server counts refusals differently.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import aiohttp
from load_client import (
    Answer,
    Prompts,
    closed_loop,
    complete,
    errors,
    open_loop,
    percentile,
    poisson,
    session,
)
from load_report import fail_on, ms, ratio, show
from load_server import Served, ServerError, Variant, make_parser, metrics, parse, resident_mib, serving

SHORT = {"seconds": 8.0, "capacity_requests": 12, "output": 16, "slots": 4, "queue": 4}
REFUSED = frozenset({429})
SAMPLE_S = 0.5
ALWAYS_0 = ("compilations_after_warmup", "invariant_violations_total")


@dataclass(frozen=True)
class Sample:
    """The server's memory at a time of `time.perf_counter()`."""

    at_s: float
    resident_mib: float


async def measure(
    args: argparse.Namespace, servers: list[Served]
) -> tuple[list[dict[str, object]], list[str]]:
    """A column of the table for each server, and what went wrong."""
    columns: list[dict[str, object]] = []
    problems: list[str] = []
    async with session() as http:
        for server in servers:
            column, wrong = await overload(http, server, args)
            columns.append(column)
            problems += [f"{server.name}: {problem}" for problem in wrong]
            print(server.name, column, file=sys.stderr)
    return columns, problems


async def overload(
    http: aiohttp.ClientSession, server: Served, args: argparse.Namespace
) -> tuple[dict[str, object], list[str]]:
    """What one server makes of it, and what it did wrong."""
    url, prompts, draw = server.url, Prompts(f"{args.seed}-{server.name}"), random.Random(f"{args.seed}")
    texts = [prompts.take(args.prompt) for _ in range(args.capacity_requests)]
    await complete(http, url, prompts.take(8), 8)
    calm = await closed_loop(http, url, texts, args.output, clients=min(args.slots, args.capacity_requests))
    if problems := errors(calm.answers):
        return {}, problems

    rate = args.factor * len(calm.done) / calm.took_s
    arrivals = [
        (at_s, prompts.take(args.prompt), draw.randint(args.output // 4, args.output * 7 // 4))
        for at_s in poisson(rate, args.seconds, args.seed)
    ]
    before, began_s = await metrics(http, url), time.perf_counter()
    sampling = asyncio.create_task(sample(http, url, began_s + args.seconds))
    load = await open_loop(http, url, arrivals)
    samples = await sampling
    after = await metrics(http, url)

    in_time = [a for a in load.done if a.ended_s <= began_s + args.seconds]
    goodput = sum(a.num_output for a in in_time) / args.seconds
    refused = [a for a in load.answers if a.status in REFUSED]
    reasons = Counter(f"{a.code}" for a in refused)
    waits = [a.retry_after_s for a in refused if a.retry_after_s is not None]
    others = errors(load.answers, but=REFUSED)
    memory = quarters(samples, began_s, args.seconds)
    offered = sum(tokens for _, _, tokens in arrivals) / args.seconds
    column = {
        "capacity": f"{calm.tokens_per_s:.1f} tokens/s, {len(calm.done) / calm.took_s:.2f} requests/s",
        "offered": f"{offered:.1f} tokens/s, {rate:.2f} requests/s for {args.seconds:g} s",
        "goodput": f"{goodput:.1f} tokens/s, {len(in_time) / args.seconds:.2f} requests/s",
        "goodput / capacity": ratio(goodput, calm.tokens_per_s),
        "answered": f"{len(load.done)} of {len(load.answers)}",
        "refused with 429": ", ".join(f"{count} {reason}" for reason, count in reasons.items()) or "0",
        "Retry-After": f"{min(waits)} - {max(waits)} s" if waits else "-",
        "other errors": sum(a.error is not None for a in load.answers) - len(refused),
        "preempted": f"{after['num_preemptions_total'] - before['num_preemptions_total']:.0f}",
        "TTFT p50": ms(percentile(load.ttfts_s(), 0.5)),
        "TTFT p95": ms(percentile(load.ttfts_s(), 0.95)),
        "inter-token p50": ms(percentile(load.gaps_s(), 0.5)),
        "inter-token p95": ms(percentile(load.gaps_s(), 0.95)),
        "resident memory, median of each quarter": ", ".join(f"{mib:,.0f}" for mib in memory) + " MiB",
    }
    return column, [
        *others, *miscounts(refused, before, after), *growth(memory, args.max_growth),
        *([] if len(waits) == len(refused) else ["a 429 without Retry-After"]),
        *(f"{name} is {after[name]:.0f}" for name in ALWAYS_0 if after.get(name)),
    ]  # fmt: skip


async def sample(http: aiohttp.ClientSession, url: str, end_s: float) -> list[Sample]:
    """The server's memory twice a second; that /metrics goes on answering is a part of the promise."""
    samples: list[Sample] = []
    while time.perf_counter() < end_s or not samples:
        values = await metrics(http, url)
        samples.append(Sample(time.perf_counter(), resident_mib(values)))
        await asyncio.sleep(SAMPLE_S)
    return samples


def quarters(samples: Sequence[Sample], began_s: float, seconds: float) -> list[float]:
    """The median memory in each quarter of the time, in MiB; one without a sample has that before it."""
    medians: list[float] = []
    for index in range(4):
        start_s, end_s = began_s + index * seconds / 4, began_s + (index + 1) * seconds / 4
        here = [s.resident_mib for s in samples if start_s <= s.at_s < end_s]
        medians.append(statistics.median(here) if here else [samples[0].resident_mib, *medians][-1])
    return medians


def growth(memory: Sequence[float], limit_mib: float) -> list[str]:
    """A complaint if memory goes on growing once the first half has filled queues and caches."""
    grown = memory[3] - memory[1]
    if grown <= limit_mib:
        return []
    return [f"memory grew by {grown:.0f} MiB in the second half, more than --max-growth {limit_mib:g}"]


def miscounts(refused: Sequence[Answer], before: dict[str, float], after: dict[str, float]) -> list[str]:
    """Complaints about reasons of refusal that the server counts in another way than the clients saw."""
    seen = Counter(answer.code for answer in refused)
    complaints = []
    for code, count in seen.items():
        key = f'admission_rejections_total{{reason="{code}"}}'
        counted = after.get(key, 0) - before.get(key, 0)
        if counted != count:
            complaints.append(f"clients saw {count} x {code}, /metrics counts {counted:.0f}")
    return complaints


def main(argv: Sequence[str] | None = None) -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--seconds", type=float, default=120.0, help="of overload (default: %(default)s)")
    parser.add_argument("--factor", type=float, default=3.0, help="times the capacity (default: %(default)s)")
    parser.add_argument("--prompt", type=int, default=128, help="words of a prompt (default: %(default)s)")
    parser.add_argument(
        "--output", type=int, default=64, help="tokens of an answer on average (default: %(default)s)"
    )
    parser.add_argument("--slots", type=int, default=32, help="of the server (default: %(default)s)")
    parser.add_argument("--queue", type=int, default=32, help="requests that may wait (default: %(default)s)")
    parser.add_argument(
        "--kv-cache-memory", default="112MiB", help="scarce on purpose (default: %(default)s)"
    )
    parser.add_argument(
        "--capacity-requests", type=int, default=96, help="that measure it (default: %(default)s)"
    )
    parser.add_argument(
        "--max-growth", type=float, default=32.0, help="MiB in the second half (default: %(default)s)"
    )
    parser.add_argument("--seed", default="0", help="of prompts and arrivals (default: %(default)s)")
    args = parse(parser, argv, SHORT)
    flags = (
        "--max-num-seqs", str(args.slots), "--max-num-queued-reqs", str(args.queue),
        "--kv-cache-memory", args.kv_cache_memory, "--max-model-len", "1024", *args.serve_flags,
    )  # fmt: skip
    variants = [Variant(mode, ("--admission", mode, *flags)) for mode in ("reserve", "optimistic")]
    try:
        with serving(args, variants) as servers:
            columns, problems = asyncio.run(measure(args, servers))
    except (ServerError, aiohttp.ClientError) as error:
        return fail_on([f"{error}"])
    rows = [[name, *(column.get(name, "-") for column in columns)] for name in max(columns, key=len)]
    show(["", *(server.name for server in servers)], rows)
    return fail_on(problems)


if __name__ == "__main__":
    raise SystemExit(main())
