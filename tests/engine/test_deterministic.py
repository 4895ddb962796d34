"""A deterministic engine computes each position of a request by the same step, whatever else goes on."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.kv_pages import KVPages
from jaxserve.engine.plan import MaskSource, Plan, StepResult
from jaxserve.engine.sequence import Sequence
from jaxserve.errors import ConfigError
from jaxserve.types import Request, SamplingParams
from tests.engine.test_serving import Served, config, request
from tests.fakes import FakeModel, FakeRunner

MODEL = FakeModel()
Origin = tuple[str, int, int, int]  # of a position: kind, B and Q of the step, and where its row began
STEM = tuple(range(10, 60))


class Origins:
    """Which step wrote what lies at each place of the pool, and whether a request alone would have it so."""

    def __init__(self, served: Served):
        self.config, self.served = served.config, served
        self.pool: dict[tuple[int, int], Origin] = {}
        self.num_checked = 0
        self._launch = served.runner.launch
        served.runner.launch = self.launch  # type: ignore[method-assign]

    def launch(self, plan: Plan, masks: MaskSource | None = None) -> int:
        slots = self.served.scheduler._slots
        owners = {row.slot: slots[row.slot] for step in plan.steps for row in step.rows}
        handle = self._launch(plan, masks)
        for step in plan.steps:
            for row in step.rows:
                slot, seq = self.served.runner.slots[row.slot], owners[row.slot]
                assert slot is not None
                assert seq is not None
                places = [
                    (slot.page_table[at // self.config.page_size], at % self.config.page_size)
                    for at in range(row.start + row.query_len)
                ]
                written_by = (step.kind, step.batch, step.queries, row.start if row.tokens else 0)
                self.pool |= dict.fromkeys(places[row.start :], written_by)
                found = [self.pool[place] for place in places]
                assert found == [self.alone(seq, at) for at in range(len(places))], seq
                self.num_checked += len(places)
        return handle

    def alone(self, seq: Sequence, at: int) -> Origin:
        if at >= seq.num_prompt:
            return "decode", self.config.decode_buckets[-1], 1, 0
        start = at - at % self.config.max_prefill_tokens
        chunk = min(self.config.max_prefill_tokens, seq.num_prompt - start)
        return "prefill", 1, min(q for b, q in self.config.prefill_buckets if q >= chunk), start


@st.composite
def lives(draw: st.DrawFn) -> tuple[EngineConfig, list[tuple[int, tuple[int, ...], int]], list[int]]:
    """Limits, (turn, prompt, max_tokens) of each request, and the turns at which one is preempted."""
    page_size = draw(st.integers(1, 6))
    max_model_len = draw(st.integers(8, 60))
    pages_per_seq = -(-max_model_len // page_size)
    limits = EngineConfig(
        max_model_len=max_model_len,
        page_size=page_size,
        num_pages=1 + pages_per_seq + draw(st.integers(0, 2 * pages_per_seq)),
        max_num_seqs=draw(st.integers(1, 5)),
        max_prefill_tokens=draw(st.integers(1, 24)),
        min_prefill_queries=draw(st.integers(1, 8)),
        prefix_alignment=draw(st.sampled_from([None, None, 2 * page_size])),
        admission=draw(st.sampled_from(["optimistic", "optimistic", "reserve"])),
        deterministic=True,
    )
    requests = []
    for _ in range(draw(st.integers(1, 10))):
        own = tuple(draw(st.lists(st.integers(5, 8), min_size=1, max_size=3)))
        prompt = (*STEM[: draw(st.integers(0, 50))], *own)[: max_model_len - 1]
        max_tokens = min(draw(st.integers(1, 30)), max_model_len - len(prompt))
        requests.append((draw(st.integers(0, 20)), prompt, max_tokens))
    preempted = draw(st.lists(st.integers(0, 60), max_size=8))
    return limits, requests, preempted if limits.admission == "optimistic" else []


def live(life: tuple[EngineConfig, list[tuple[int, tuple[int, ...], int]], list[int]]) -> int:
    """Serve it, check every origin and every answer, and return how many positions were looked at."""
    limits, requests, preempted = life
    served = Served(limits, MODEL, expected_output=0.0)
    origins = Origins(served)
    for turn in range(61):
        for number, (arrival, prompt, max_tokens) in enumerate(requests):
            if arrival == turn:
                params = SamplingParams(max_tokens, ignore_eos=True)
                served.engine.submit(Request(str(number), prompt, params, 0.0))
        for _ in range(preempted.count(turn)):
            running = list(served.scheduler._running())
            if running:
                served.scheduler.preempt(running[turn % len(running)])
        served.turn()
    served.run()
    for number, (_, prompt, max_tokens) in enumerate(requests):
        ids = [i for event in served.events[str(number)] for i in event.token_ids]
        assert ids == MODEL.alone(prompt, SamplingParams(max_tokens, ignore_eos=True))
    return origins.num_checked


@settings(max_examples=150, phases=[Phase.explicit, Phase.generate])
@given(lives())
def test_every_position_is_computed_by_the_same_step_in_the_same_chunk_whatever_else_runs(life):
    assert live(life) > 0


def share_what_was_generated(monkeypatch):
    def register_next(self, seq, end):
        seq.register_at = end

    monkeypatch.setattr(KVPages, "_register_next", register_next)


def hit_at_any_page(monkeypatch):
    monkeypatch.setattr(EngineConfig, "hit_alignment", property(lambda self: self.page_size))


def prefill_what_was_generated(monkeypatch):
    monkeypatch.setattr(Sequence, "replay", lambda self: None)


@pytest.mark.parametrize("bug", [share_what_was_generated, hit_at_any_page, prefill_what_was_generated])
def test_a_step_that_depends_on_others_is_noticed(bug, monkeypatch, caplog):
    """A long conversation, told twice with a preemption, under each bug that the mode exists to exclude."""
    first = (*STEM[:11], 5)
    whole = (*first, *MODEL.alone(first, SamplingParams(18)), 6, 7)
    limits = config(max_prefill_tokens=8, min_prefill_queries=2, deterministic=True)
    life = limits, [(0, first, 18), (30, STEM[:18], 4), (40, whole, 4), (44, STEM[:14], 10)], [6, 8, 47]
    assert live(life) > 0
    caplog.set_level("CRITICAL")
    bug(monkeypatch)
    with pytest.raises(AssertionError):
        live(life)


def test_a_preempted_request_tells_nothing_twice_and_counts_nothing_twice():
    limits = config(max_model_len=64, num_pages=20, max_num_seqs=2, max_prefill_tokens=4, deterministic=True)
    served = Served(limits, MODEL, expected_output=0.0)
    for number in range(2):
        served.engine.submit(request(number, (5 + number,) * 8, SamplingParams(40)))
    served.run()
    assert served.scheduler.num_preemptions > 0
    for number in range(2):
        events = served.events[str(number)]
        assert [i for event in events for i in event.token_ids] == MODEL.alone(
            (5 + number,) * 8, SamplingParams(40)
        )
        assert [event.num_output_tokens for event in events] == list(range(1, 41))
        assert {event.num_cached_tokens for event in events} == {0}
    assert served.engine.stats().num_queried_tokens == 16


class Forgetful(FakeRunner):
    """A device that answers otherwise from its 60th step on."""

    def fetch(self, handle: int) -> tuple[StepResult, ...]:
        results = super().fetch(handle)
        if handle < 60:
            return results
        return tuple(replace(one, token_ids=tuple(i + 1 for i in one.token_ids)) for one in results)


def test_an_answer_that_can_not_be_repeated_is_an_error_of_that_request_alone():
    limits = config(max_model_len=64, num_pages=20, max_num_seqs=2, deterministic=True)
    served = Served(limits, MODEL, expected_output=0.0)
    served.runner = Forgetful(limits, MODEL)
    served.engine._runner = served.runner
    served.runner.watch(served.scheduler)
    for number in range(2):
        served.engine.submit(request(number, (5 + number,) * 8, SamplingParams(40)))
    served.run()
    first, second = (served.events[str(number)][-1] for number in range(2))
    assert first.finish_reason == "length"
    assert second.finish_reason == "error"
    assert "not deterministic" in second.error
    ids = [i for event in served.events["1"] for i in event.token_ids]
    assert ids == MODEL.alone((6,) * 8, SamplingParams(40))[: len(ids)]


def test_shapes_are_one_decode_step_and_prefill_steps_of_one_row():
    limits = EngineConfig(
        max_model_len=1024, num_pages=1000, max_num_seqs=6, max_prefill_tokens=200, deterministic=True
    )
    assert limits.decode_buckets == (6,)
    assert limits.prefill_buckets == ((1, 32), (1, 64), (1, 128), (1, 200))
    assert limits.hit_alignment == 400  # whole chunks and whole pages
    assert replace(limits, prefix_alignment=48).hit_alignment == 1200


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"decode_buckets": (2, 6)}, r"decode_buckets=\[2, 6\] contradicts deterministic.* list only 6"),
        ({"prefill_buckets": ((1, 64), (2, 32))}, "prefill_buckets: 2 x 32 contradicts deterministic"),
        ({"deterministic": 1}, "deterministic=1 must be true or false"),
    ],
)
def test_shapes_that_depend_on_others_are_refused(wrong, message):
    with pytest.raises(ConfigError, match=message):
        EngineConfig(
            **{"max_model_len": 64, "num_pages": 100, "max_num_seqs": 6, "deterministic": True, **wrong}
        )
