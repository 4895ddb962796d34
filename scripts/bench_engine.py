#!/usr/bin/env python3
"""Time of the host per turn of the engine, with a device that answers at once.

Run from the repository's root: `.venv/bin/python scripts/bench_engine.py [SLOTS]`.
"""

from __future__ import annotations

import random
import sys
import time

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.plan import Plan, StepResult
from jaxserve.types import Request, SamplingParams


class BytesTokenizer:
    """An id is a byte."""

    vocab_size, bos_id, add_bos, eos_ids = 256, None, False, frozenset[int]()

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


class NullRunner:
    """Answers at once."""

    def launch(self, plan: Plan) -> Plan:
        return plan

    def fetch(self, handle: Plan) -> tuple[StepResult, ...]:
        (step,) = handle.steps
        return (StepResult(tuple(97 + (row.start * 7 + row.slot) % 26 for row in step.rows)),)


def measure(name: str, num_slots: int, num_pages: int, shared: int) -> None:
    """Serve ten requests a slot, `shared` tokens of each prompt in common; print times of full turns."""
    config = EngineConfig(
        max_model_len=2048, num_pages=num_pages, max_num_seqs=num_slots, max_num_queued=1 << 20,
        max_queued_tokens=1 << 40,
    )  # fmt: skip
    engine = Engine(config, NullRunner(), BytesTokenizer(), deliver=lambda events: None)
    engine.start(in_thread=False)
    draw = random.Random(1)
    system = tuple(draw.randrange(256) for _ in range(shared))
    for number in range(10 * num_slots):
        prompt = system + tuple(draw.randrange(256) for _ in range(draw.choice([20, 128, 128, 700])))
        params = SamplingParams(draw.choice([64, 200, 300]), ignore_eos=True)
        engine.submit(Request(str(number), prompt, params, time.monotonic()))
    times: dict[str, list[float]] = {"prefill": [], "decode": []}
    before = engine.stats()
    while True:
        began_s = time.thread_time()
        if not engine.turn():
            break
        took_s = time.thread_time() - began_s
        stats = engine.stats()
        if stats.num_running >= 0.9 * num_slots:
            is_prefill = stats.num_steps["prefill"] > before.num_steps.get("prefill", 0)
            times["prefill" if is_prefill else "decode"].append(took_s)
        before = stats
    for kind, taken in times.items():
        ordered = sorted(taken)
        p50, p99 = (1e6 * ordered[int(len(ordered) * part)] for part in (0.5, 0.99))
        print(f"{name:18} {kind:8} {len(taken):5} turns   p50 {p50:5.0f} us   p99 {p99:5.0f} us   "
              f"preempted {before.num_preemptions}")  # fmt: skip


if __name__ == "__main__":
    slots = int(sys.argv[1]) if len(sys.argv) > 1 else 64
    print(f"CPU time of a turn with {slots} slots")
    measure("ample pages", slots, slots * 128 + 1, 0)
    measure("shared prefix", slots, slots * 128 + 1, 1000)
    measure("too few pages", slots, slots * 24, 0)
