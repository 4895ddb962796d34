#!/usr/bin/env python3
"""Host time by turn of the engine, with a fake device and with a real one.

    .venv/bin/python scripts/bench_engine.py --slots 64 --model smollm2-135m

Counted are turns in which at least nine of ten slots run. "host CPU" is the engine thread's own time, which
other load on the machine hardly changes. With the fake device its own work is left out; with the real one
all is in that the engine's thread does to plan, pack, launch and read a step. "host wall" is the time of the
turn less the wait for ids, as `/metrics` shows it. The model is left out where it has not been pulled.
"""

from __future__ import annotations

import argparse
import gc
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the fake device is one of the tests'

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.plan import Runner
from jaxserve.types import Request, SamplingParams
from tests.fakes import FakeRunner, FakeTokenizer


class Timed:
    """A runner, and what the thread has spent in it since `reset`: CPU time, and wall time of `fetch`."""

    def __init__(self, runner: Runner):
        self._runner = runner
        self.reset()

    def reset(self) -> None:
        self.cpu_s = self.wait_s = 0.0

    def launch(self, *args: Any) -> Any:
        began_s = time.thread_time()
        try:
            return self._runner.launch(*args)
        finally:
            self.cpu_s += time.thread_time() - began_s

    def fetch(self, handle: Any) -> Any:
        began_s, wall_s = time.thread_time(), time.perf_counter()
        try:
            return self._runner.fetch(handle)
        finally:
            self.cpu_s += time.thread_time() - began_s
            self.wait_s += time.perf_counter() - wall_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--turns", type=int, default=300, help="tokens of each answer, about")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--decode-steps", type=int, default=1)
    args = parser.parse_args()
    slots, turns = args.slots, args.turns
    print(f"{slots} slots, times of a turn in us")
    for name, num_pages, shared in (
        ("fake, ample pages", slots * 64 + 1, 0),
        ("fake, shared prefix", slots * 64 + 1, 400),
        ("fake, too few pages", slots * 12, 0),
    ):
        config = EngineConfig(
            max_model_len=1024, num_pages=num_pages, max_num_seqs=slots, max_num_queued=1 << 20,
            decode_steps=args.decode_steps,
        )  # fmt: skip
        requests = some_requests(2 * slots, shared, turns)
        measure(name, config, FakeRunner(config), requests, is_fake=True)
    measure_model(args.model, slots, turns, args.decode_steps)


def some_requests(count: int, shared: int, turns: int) -> list[Request]:
    """Prompts of several lengths, the first `shared` tokens in common, and answers around `turns` tokens."""
    draw = random.Random(1)
    system = tuple(draw.randrange(3, 256) for _ in range(shared))
    requests = []
    for number in range(count):
        prompt = system + tuple(draw.randrange(3, 256) for _ in range(draw.choice([16, 64, 64, 200])))
        length = min(draw.choice([turns // 2, turns, turns * 3 // 2]), 1024 - len(prompt))
        params = SamplingParams(length, temperature=0.0, ignore_eos=True)
        requests.append(Request(str(number), prompt, params, time.monotonic()))
    return requests


def measure_model(name: str, slots: int, turns: int, decode_steps: int) -> None:
    from jaxserve.errors import JaxserveError
    from jaxserve.launch import compile_cache_folder
    from jaxserve.ops.backend import choose
    from jaxserve.runtime.runner import ModelRunner
    from jaxserve.weights.model_files import open_model

    try:
        files = open_model(name)
    except JaxserveError as error:
        print(f"no figures of a real device: {error}")
        return
    params, model = files.load_params("bfloat16"), files.config
    files.close()
    config = EngineConfig(
        max_model_len=1024, num_pages=slots * 64 + 1, max_num_seqs=slots, max_num_queued=1 << 20,
        decode_buckets=(max(2, slots),), prefill_buckets=((1, 512), (min(8, slots), 64)),
        decode_steps=decode_steps,
    )  # fmt: skip
    backend = choose("auto", "auto", head_dim=model.head_dim)
    runner = ModelRunner(
        model, params, config, backend, dtype="bfloat16", cache=compile_cache_folder(None)
    )
    measure(name, config, runner, some_requests(slots, 0, turns), is_fake=False)


def measure(name: str, config: EngineConfig, runner: Runner, requests: list[Request], is_fake: bool) -> None:
    """Serve all requests; print the times of turns that launch a prefill, and of those that decode."""
    gc.freeze()  # as the server does
    timed = Timed(runner)
    engine = Engine(config, timed, FakeTokenizer(), deliver=lambda events: None)
    engine.start(in_thread=False)
    for request in requests:
        engine.submit(request)
    times: dict[str, list[tuple[float, float]]] = {"prefill": [], "decode": []}
    before = engine.stats()
    while True:
        timed.reset()
        began_s, wall_s = time.thread_time(), time.perf_counter()
        if not engine.turn():
            break
        cpu_s, wall_s = time.thread_time() - began_s, time.perf_counter() - wall_s
        stats = engine.stats()
        if stats.num_running >= 0.9 * config.max_num_seqs:
            is_prefill = stats.num_steps["prefill"] > before.num_steps.get("prefill", 0)
            cpu_s -= timed.cpu_s if is_fake else 0.0
            times["prefill" if is_prefill else "decode"].append((cpu_s, wall_s - timed.wait_s))
        before = stats
    for kind, taken in times.items():
        if not taken:
            continue
        line = f"{name:20} {kind:8} {len(taken):5} turns   host CPU {spread([cpu for cpu, _ in taken])}"
        if not is_fake:
            line += f"   host wall {spread([wall for _, wall in taken])}"
        print(line)
    num_steps = sum(before.device_times.counts)
    if not is_fake:
        mean_s = before.device_times.sum_s / num_steps
        print(f"{name:20} device: {1e6 * mean_s:.0f} a step, mean of {num_steps}")


def spread(seconds: list[float]) -> str:
    ordered = sorted(seconds)
    p50, p95 = (1e6 * ordered[int(len(ordered) * part)] for part in (0.5, 0.95))
    return f"p50 {p50:5.0f}  p95 {p95:5.0f}"


if __name__ == "__main__":
    main()
