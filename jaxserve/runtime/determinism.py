"""What `EngineConfig.deterministic` needs of a device, tried out at start-up.

The scheduler sees to it that a request's steps are the same whatever else runs: docs/determinism.md. What is
left to the device is that a step gives a row the same bits in every place of its rectangle and beside any
other rows. No library promises that, so it is measured, on the programs that will serve.
"""

from __future__ import annotations

import os
from typing import Any

import jax
import numpy as np

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.plan import Row, Step
from jaxserve.errors import ConfigError
from jaxserve.models.config import ModelConfig
from jaxserve.runtime import batch as layout
from jaxserve.runtime.logprobs import num_scored
from jaxserve.types import SamplingParams

GPU_FLAG = "--xla_gpu_deterministic_ops"


def require_deterministic_device() -> None:
    """Raise ConfigError where XLA may choose or run kernels otherwise from one time to the next."""
    flags = os.environ.get("XLA_FLAGS", "").split()
    if jax.default_backend() == "gpu" and not {GPU_FLAG, f"{GPU_FLAG}=true"} & set(flags):
        raise ConfigError(
            f"deterministic: on a GPU, XLA takes kernels by their speed and adds in any order unless told "
            f"otherwise; set the environment variable XLA_FLAGS={GPU_FLAG}=true"
        )


class RowCheck:
    """Runs rows through the compiled steps and compares their bits. Gives back the pool and the state."""

    def __init__(
        self, steps: dict[Any, Any], leaves: list[jax.Array], kv: Any, state: Any,
        model: ModelConfig, config: EngineConfig,
    ):  # fmt: skip
        self._steps, self._leaves, self._model, self._config = steps, leaves, model, config
        self.kv, self.state = kv, state
        self._rng = np.random.default_rng(0)

    def run(self) -> None:
        """Raise ConfigError when a row's bits depend on its place or on the rows beside it.

        Writes pages and slots, which nobody owns yet: whoever gets them writes them before reading.
        """
        config = self._config
        queries, slots = config.prefill_buckets[0][1], range(config.max_num_seqs)
        start = min(queries, config.max_model_len - 1)
        tokens = tuple(self._rng.integers(self._model.vocab_size, size=start).tolist())
        pages = tuple(range(1, 1 + config.pages_for(start + 1)))
        for slot in slots:  # all of the same prompt, on the same pages
            self._prefill(slot, tokens, pages)
        rows = [Row(slot, start, 1, None, 0, (), True, None) for slot in slots]
        alone, _ = self._decode(rows[:1])
        together, device_rows = self._decode(rows)
        self._compare("another place of a decode step", together[: len(slots)], alone[0])
        for slot in slots[1:]:  # others, of any length, on the trash page
            self._prefill(slot, tokens[:1], (0,) * config.pages_per_seq)
            rows[slot] = Row(slot, int(self._rng.integers(config.max_model_len)), 1, None, 0, (), True, None)
        for order in (rows, rows[::-1]):
            mixed, _ = self._decode(order)
            self._compare("a decode step with other rows", mixed[[order.index(rows[0])]], alone[0])
        self._compare_samplers(together, device_rows, len(slots))
        self._compare_scores()

    def _prefill(self, slot: int, tokens: tuple[int, ...], pages: tuple[int, ...]) -> None:
        row = Row(slot, 0, len(tokens), tokens, 0, pages, False, SamplingParams(1, seed=1))
        self._forward(Step("prefill", *self._config.prefill_buckets[0], (row,)))

    def _decode(self, rows: list[Row]) -> tuple[np.ndarray, Any]:
        logits, device_rows = self._forward(Step("decode", self._config.decode_buckets[0], 1, tuple(rows)))
        return np.asarray(logits), device_rows

    def _forward(self, step: Step) -> tuple[Any, Any]:
        program = self._steps[step.kind, step.batch, step.queries]
        packed = layout.pack(step, self._config)
        self.kv, self.state, logits, rows, *_ = program(self._leaves, self.kv, self.state, packed)
        return logits, rows

    def _compare_samplers(self, logits: np.ndarray, rows: Any, num_rows: int) -> None:
        batch = len(logits)
        self.state, ids = self._steps["random", batch, 1](self.state, logits, rows)
        ids = np.asarray(ids)
        self._compare("another row of a sampler", ids[:num_rows], ids[0])
        figures = np.asarray(self._steps["logprobs", batch, 1](logits, np.zeros(batch, np.int32)))
        self._compare("another row of log-probabilities", figures[:num_rows], figures[0])

    def _compare_scores(self) -> None:
        hidden = self._rng.standard_normal(self._model.hidden_size, np.float32)
        wanted = np.zeros((2, num_scored(self._config, self._model.vocab_size)), np.int32)
        same = np.broadcast_to(hidden, (wanted.shape[1], len(hidden))).copy()
        figures = np.asarray(self._steps["score", 1, 1](self._leaves, same, wanted))
        self._compare("another row of prompt log-probabilities", figures, figures[0])

    def _compare(self, where: str, found: np.ndarray, wanted: np.ndarray) -> None:
        if all(row.tobytes() == wanted.tobytes() for row in found):
            return
        raise ConfigError(
            f"deterministic: {jax.devices()[0].device_kind} computes a row with other bits in {where}; "
            "choose other kernels (--attention-backend, --linear-backend), or --max-num-seqs 1"
        )
