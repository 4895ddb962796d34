#!/usr/bin/env python3
"""Closed-loop load on any OpenAI-compatible server: throughput, TTFT and inter-token latency.

    .venv/bin/python scripts/bench_serve.py --url http://127.0.0.1:8000 --clients 1 8 32

Each client sends one streamed completion after another: greedy, end-of-sequence ignored, a random prompt
that no cache has seen. One line of JSON a level. Compare two servers on the same machine, one after the
other; a figure alone says little.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from dataclasses import dataclass, field

import aiohttp

VOCABULARY = (
    "river stone market letter garden winter music paper window orange silver bridge forest teacher "
    "morning engine planet island doctor kitchen summer village history machine"
).split()


@dataclass
class Measured:
    """One request. Times in seconds of one monotonic clock."""

    sent: float
    chunks: list[float] = field(default_factory=list)
    num_prompt: int = 0
    num_output: int = 0


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, round(share * (len(ordered) - 1)))]


async def send(session: aiohttp.ClientSession, args: argparse.Namespace, prompt: str) -> Measured:
    body = {
        "prompt": prompt, "max_tokens": args.output, "temperature": 0, "ignore_eos": True,
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    if args.model:
        body["model"] = args.model
    measured = Measured(time.perf_counter())
    async with session.post(args.url + "/v1/completions", json=body) as response:
        if response.status != 200:
            raise SystemExit(f"HTTP {response.status}: {await response.text()}")
        async for line in response.content:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise SystemExit(f"the server reports: {chunk['error']}")
            if chunk.get("choices"):
                measured.chunks.append(time.perf_counter())
            if usage := chunk.get("usage"):
                measured.num_prompt, measured.num_output = usage["prompt_tokens"], usage["completion_tokens"]
    return measured


async def run_level(session: aiohttp.ClientSession, args: argparse.Namespace, clients: int) -> dict:
    source = random.Random(f"{args.seed}-{clients}")
    done: list[Measured] = []

    async def client() -> None:
        for _ in range(args.rounds):
            prompt = args.shared_prefix + " ".join(source.choices(VOCABULARY, k=args.prompt))
            done.append(await send(session, args, prompt))

    began = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    took = time.perf_counter() - began
    ttft = [1e3 * (m.chunks[0] - m.sent) for m in done]
    gaps = [1e3 * (b - a) for m in done for a, b in zip(m.chunks, m.chunks[1:])]
    figures = {"ttft": ttft, "itl": gaps or [float("nan")]}
    return {
        "clients": clients,
        "requests": len(done),
        "prompt_tokens": sum(m.num_prompt for m in done) // len(done),
        "output_tokens": sum(m.num_output for m in done) // len(done),
        "tokens_per_s": round(sum(m.num_output for m in done) / took, 1),
        **{
            f"{name}_p{round(100 * share)}_ms": round(percentile(values, share), 1)
            for name, values in figures.items()
            for share in (0.5, 0.95)
        },
    }


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--model", help="name to send; default: none, the server's own")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--prompt", type=int, default=128, help="words a prompt")
    parser.add_argument("--output", type=int, default=64, help="tokens an answer")
    parser.add_argument("--rounds", type=int, default=2, help="requests a client")
    parser.add_argument("--shared-prefix", default="", help="text in front of every prompt")
    parser.add_argument("--seed", default="0")
    args = parser.parse_args()
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=aiohttp.TCPConnector(limit=0)
    ) as session:
        await send(session, args, "warm up")
        for clients in args.clients:
            print(json.dumps(await run_level(session, args, clients)), flush=True)


if __name__ == "__main__":
    asyncio.run(main())
