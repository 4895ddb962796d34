"""Driving an engine over a real runner, turn by turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.plan import Runner
from jaxserve.types import Event, Request, SamplingParams
from tests.fakes import FakeTokenizer


@dataclass(frozen=True)
class Job:
    """A request that arrives when the engine has made so many turns."""

    prompt_ids: tuple[int, ...]
    params: SamplingParams
    turn: int = 0


def serve(
    config: EngineConfig, runner: Runner, jobs: Sequence[Job], eos_ids: frozenset[int] = frozenset()
) -> list[list[int]]:
    """The ids that each job is answered with. Without `eos_ids` nothing ends one but its max_tokens."""
    events: list[Event] = []
    engine = Engine(config, runner, FakeTokenizer(), deliver=events.extend, eos_ids=eos_ids)
    engine.start(in_thread=False)
    waiting, turn = sorted(range(len(jobs)), key=lambda n: jobs[n].turn), 0
    while True:
        while waiting and jobs[waiting[0]].turn <= turn:
            n = waiting.pop(0)
            engine.submit(Request(str(n), jobs[n].prompt_ids, jobs[n].params, arrival_s=0.0))
        if not engine.turn() and not waiting:
            break
        turn += 1
    errors = [event.error for event in events if event.error is not None]
    assert not errors, errors
    ids: list[list[int]] = [[] for _ in jobs]
    for event in events:
        ids[int(event.request_id)].extend(event.token_ids)
    if not eos_ids:
        assert [len(answer) for answer in ids] == [job.params.max_tokens for job in jobs]
    return ids
