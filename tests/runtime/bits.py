"""What a request was answered, to the last bit: ids, log-probabilities and the logits behind them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.plan import MaskSource, Plan, StepResult
from jaxserve.runtime.runner import ModelRunner
from jaxserve.types import EngineStats, Event, Request, TokenLogprobs
from tests.fakes import FakeTokenizer
from tests.runtime.serving import Job


@dataclass(frozen=True)
class Told:
    """One request's answer. `logits` has, by the position of the token they yielded, hashes of all the rows
    of logits that were computed there: one, unless the engine computed something twice, and otherwise."""

    ids: list[int]
    logprobs: list[TokenLogprobs | None]  # of the prompt, None for its first token, and of the ids
    logits: dict[int, set[str]]
    num_cached: int


@dataclass
class Recorder:
    """A runner that keeps hashes of the logits by the seed of the request, which tells requests apart."""

    runner: ModelRunner
    logits: dict[int, dict[int, set[str]]] = field(default_factory=dict)
    _pending: list[Any] = field(default_factory=list)
    _seeds: dict[int, int] = field(default_factory=dict)  # by slot

    def __post_init__(self) -> None:
        for key, program in list(self.runner._steps.items()):
            if key[0] in ("prefill", "decode"):
                self.runner._steps[key] = self._recording(program)

    def _recording(self, program: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            result = program(*args)
            self._pending.append(result[2])
            return result

        return run

    def launch(self, plan: Plan, masks: MaskSource | None = None) -> Any:
        handle = self.runner.launch(plan, masks)
        for step, logits in zip(plan.steps, map(np.asarray, self._pending), strict=True):
            for row, own in zip(step.rows, logits):
                if row.params is not None:
                    self._seeds[row.slot] = row.params.seed
                if row.sample:
                    by_position = self.logits.setdefault(self._seeds[row.slot], {})
                    digest = hashlib.sha256(own.tobytes()).hexdigest()
                    by_position.setdefault(row.start + row.query_len, set()).add(digest)
        self._pending.clear()
        return handle

    def fetch(self, handle: Any) -> tuple[StepResult, ...]:
        return self.runner.fetch(handle)

    def answer(
        self, config: EngineConfig, jobs: Sequence[Job], *, expected_output: float = 0.0
    ) -> tuple[list[Told], EngineStats]:
        """Serve `jobs`, each with a seed of its own, in an engine that has seen nothing before.

        `expected_output` is what admission takes for the length of answers: 0 leads to preemptions.
        """
        self.logits = {}
        events: dict[str, list[Event]] = {str(n): [] for n in range(len(jobs))}

        def deliver(batch: list[Event]) -> None:
            for event in batch:
                events[event.request_id].append(event)

        engine = Engine(config, self, FakeTokenizer(), deliver=deliver, eos_ids=frozenset())
        engine._scheduler._admission.mean_output = expected_output
        engine.start(in_thread=False)
        turn, num_submitted = 0, 0
        while True:
            for n, job in enumerate(jobs):
                if job.turn == turn:
                    engine.submit(Request(str(n), job.prompt_ids, job.params, arrival_s=0.0))
                    num_submitted += 1
            if not engine.turn() and num_submitted == len(jobs):
                break
            turn += 1
        return [self._told(jobs[n], events[str(n)]) for n in range(len(jobs))], engine.stats()

    def _told(self, job: Job, events: list[Event]) -> Told:
        assert events[-1].finish_reason == "length", events[-1].error
        return Told(
            [i for event in events for i in event.token_ids],
            [one for event in events for one in (*(event.prompt_logprobs or ()), *event.logprobs)],
            self.logits[job.params.seed],
            events[-1].num_cached_tokens,
        )
