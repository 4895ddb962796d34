#!/usr/bin/env python3
"""Time and memory of long prompts, against the arithmetic they need.

    .venv/bin/python scripts/bench_context.py --lengths 1024 2048 4096 8000
    .venv/bin/python scripts/bench_context.py --model gemma3-270m --lengths 4096 8192 16384 32000

One request at a time, on an idle engine, with a prompt that no cache has seen. The arithmetic is that of the
weights (2 operations each and token) and of attention (4 for each key, query head and value of a head, within
the window of each layer). Where time grows no faster than it, operations a second don't fall.
"""

from __future__ import annotations

import argparse
import random
import sys
import threading
import time
from collections.abc import Sequence

import psutil
from load_report import show

from jaxserve.launch import LaunchOptions, LoadedEngine, load_engine
from jaxserve.models.config import ModelConfig
from jaxserve.types import Event, Request, SamplingParams
from jaxserve.weights.model_files import open_model

COLUMNS = ("prompt tokens", "prefill", "arithmetic", "a second", "decode, a token", "memory of the process")


class Answers:
    """Of one request at a time: when its tokens came."""

    def __init__(self) -> None:
        self._times_s: list[float] = []
        self._ended = threading.Event()

    def deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            assert event.error is None, event.error
            self._times_s += [event.time_s] * len(event.token_ids)
            if event.finish_reason is not None:
                self._ended.set()

    def ask(self, loaded: LoadedEngine, prompt: Sequence[int], max_tokens: int) -> tuple[float, float]:
        """(seconds to the first token, mean seconds of those after it)."""
        self._times_s.clear()
        self._ended.clear()
        params = SamplingParams(max_tokens, temperature=0.0, ignore_eos=True)
        arrival_s = time.monotonic()
        loaded.engine.submit(Request(f"{arrival_s}", tuple(prompt), params, arrival_s))
        self._ended.wait()
        first_s, last_s = self._times_s[0], self._times_s[-1]
        return first_s - arrival_s, (last_s - first_s) / (max_tokens - 1)


def operations(model: ModelConfig, length: int, num_weights: int) -> float:
    """Of a prefill: each weight of a layer once a token, and the keys that each query sees."""
    keys = 0
    for layer in model.layers:
        window = min(length, layer.window or length)
        keys += window * (window + 1) // 2 + (length - window) * window
    return 2.0 * num_weights * length + 4.0 * model.num_heads * model.head_dim * keys


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8000])
    parser.add_argument("--output", type=int, default=16, help="tokens of an answer (default: %(default)s)")
    parser.add_argument("--max-num-batched-tokens", type=int, help="as of jaxserve serve")
    args = parser.parse_args()
    answers, longest = Answers(), max(args.lengths) + args.output
    files = open_model(args.model)
    model = files.config
    shapes = {name: shape for name, shape in files.param_shapes.items() if name.startswith("layers.")}
    files.close()
    num_weights = sum(shape[0] * shape[1] * shape[2] for shape in shapes.values() if len(shape) == 3)
    loaded = load_engine(
        LaunchOptions(
            args.model, max_model_len=longest, max_num_seqs=1, kv_cache_memory=4 << 30,
            max_num_batched_tokens=args.max_num_batched_tokens,
        ),
        deliver=answers.deliver,
    )  # fmt: skip
    draw, process, rows = random.Random(1), psutil.Process(), []
    answers.ask(loaded, [draw.randrange(3, 1000) for _ in range(300)], 2)
    for length in args.lengths:
        prompt = [draw.randrange(3, min(model.vocab_size, 30_000)) for _ in range(length)]
        prefill_s, token_s = answers.ask(loaded, prompt, args.output)
        work = operations(model, length, num_weights)
        rows.append([
            length, f"{prefill_s:.2f} s", f"{work / 1e12:.2f} T", f"{work / prefill_s / 1e9:.0f} G",
            f"{1e3 * token_s:.1f} ms", f"{process.memory_info().rss / 2**20:.0f} MiB",
        ])  # fmt: skip
        print(*rows[-1], sep="  ", file=sys.stderr)
    loaded.engine.stop()
    show(COLUMNS, rows)


if __name__ == "__main__":
    main()
