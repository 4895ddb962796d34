"""Log-probabilities through the engine: whatever is chunked, shared or preempted, each token's own, once."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.sequence import SequenceState
from jaxserve.types import Event, Request, SamplingParams
from tests.engine.oracle import answer
from tests.engine.test_serving import MODEL, TOKENIZER, Served

STEMS = (tuple(range(10, 60)), (7,) * 50)  # prompts begin alike


@dataclass(frozen=True)
class Job:
    turn: int  # at which it arrives
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    preempt_after: int | None  # turns from its arrival


@st.composite
def workloads(draw: st.DrawFn) -> tuple[EngineConfig, list[Job]]:
    page_size = draw(st.sampled_from([1, 3, 4, 8]))
    pages_per_seq = -(-60 // page_size)
    config = EngineConfig(
        max_model_len=60,
        page_size=page_size,
        num_pages=1 + pages_per_seq + draw(st.integers(0, 2 * pages_per_seq)),
        max_num_seqs=draw(st.integers(1, 4)),
        max_prefill_tokens=draw(st.sampled_from([3, 8, 20, 64])),
        min_prefill_queries=draw(st.sampled_from([1, 4, 8])),
        **draw(st.sampled_from([{}, {"decode_steps": 4}, {"deterministic": True}])),
    )
    jobs = []
    for _ in range(draw(st.integers(1, 6))):
        own = draw(st.lists(st.integers(5, 8), min_size=1, max_size=4))
        prompt = (*draw(st.sampled_from(STEMS))[: draw(st.integers(0, 50))], *own)
        params = SamplingParams(
            draw(st.integers(0, min(12, 60 - len(prompt)))),
            temperature=0.5,
            seed=draw(st.integers(0, 1)),
            logprobs=draw(st.sampled_from([None, 0, 1, 5])),
            prompt_logprobs=draw(st.sampled_from([None, 0, 2, 20])),
        )
        preempt_after = draw(st.sampled_from([None, 1, 2, 3, 5, 8]))
        jobs.append(Job(draw(st.integers(0, 12)), prompt, params, preempt_after))
    return config, jobs


def run(config: EngineConfig, jobs: list[Job]) -> Served:
    served = Served(config, expected_output=0.0)
    for turn in range(max(job.turn + (job.preempt_after or 0) for job in jobs) + 1):
        for n, job in enumerate(jobs):
            if job.turn == turn:
                served.engine.submit(Request(str(n), job.prompt_ids, job.params, arrival_s=0.0))
            if job.preempt_after is not None and job.turn + job.preempt_after == turn:
                for seq in list(served.scheduler._running()):
                    if seq.request.request_id == str(n):
                        served.scheduler.preempt(seq)
                        assert seq.state is SequenceState.PREEMPTED
        served.turn()
    served.run()
    return served


def check(events: list[Event], prompt: tuple[int, ...], params: SamplingParams) -> None:
    ids = answer(MODEL.alone(prompt, params), params, TOKENIZER).token_ids if params.max_tokens else ()
    assert tuple(token_id for event in events for token_id in event.token_ids) == ids
    assert events[-1].num_output_tokens == len(ids)
    for event in events:
        assert len(event.logprobs) == (0 if params.logprobs is None else len(event.token_ids))
    whole = (*prompt, *ids)
    if params.logprobs is not None:
        assert [one for event in events for one in event.logprobs] == [
            MODEL.score(whole[:at], whole[at], params.logprobs) for at in range(len(prompt), len(whole))
        ]
    told = [event.prompt_logprobs for event in events if event.prompt_logprobs is not None]
    if params.prompt_logprobs is None:
        assert not told
    else:
        assert events[0].prompt_logprobs is not None
        count = params.prompt_logprobs
        scores = [MODEL.score(prompt[:at], prompt[at], count) for at in range(1, len(prompt))]
        assert told == [(None, *scores)]


@settings(max_examples=30)
@given(workloads())
def test_every_token_gets_its_own_log_probabilities_once(workload):
    config, jobs = workload
    served = run(config, jobs)
    for n, job in enumerate(jobs):
        check(served.events[str(n)], job.prompt_ids, job.params)


CONFIG = EngineConfig(
    max_model_len=60, num_pages=60, page_size=4, max_num_seqs=4, max_prefill_tokens=8, min_prefill_queries=4,
    decode_steps=4,
)  # fmt: skip
PROMPT = STEMS[0][:30]


def test_a_prompt_to_be_scored_is_computed_though_the_cache_has_it_and_then_shared():
    served = Served(CONFIG)
    for name, params in {
        "first": SamplingParams(1, seed=0),
        "scored": SamplingParams(1, seed=0, prompt_logprobs=1),
        "last": SamplingParams(1, seed=0, logprobs=1),
    }.items():
        served.engine.submit(Request(name, PROMPT, params, arrival_s=0.0))
        served.run()
        check(served.events[name], PROMPT, params)
    cached = {name: events[-1].num_cached_tokens for name, events in served.events.items()}
    assert cached == {"first": 0, "scored": 0, "last": 28}


def test_after_a_preemption_what_is_scored_comes_from_the_cache_and_is_not_scored_again():
    served = Served(CONFIG)
    params = SamplingParams(3, seed=0, prompt_logprobs=2)
    served.engine.submit(Request("a", PROMPT, params, arrival_s=0.0))
    for _ in range(2):  # two chunks of 8
        served.turn()
    (seq,) = served.scheduler._running()
    served.scheduler.preempt(seq)
    served.run()
    check(served.events["a"], PROMPT, params)
    rows = [row for plan in served.runner.plans for step in plan.steps for row in step.rows]
    assert [row.start for row in rows if row.tokens is not None] == [0, 8, 16, 24]
    assert sum(len(row.targets) for row in rows) == len(PROMPT) - 1


def test_requests_that_ask_for_no_log_probabilities_run_in_steps_without_them():
    served = Served(CONFIG)
    served.engine.submit(Request("a", PROMPT, SamplingParams(9, seed=0), arrival_s=0.0))
    served.run()
    steps = [step for plan in served.runner.plans for step in plan.steps]
    assert {step.iterations for step in steps if step.kind == "decode"} == {4}
    assert not any(row.targets for step in steps for row in step.rows)


@pytest.mark.parametrize("num_prompt", [1, 4, 60])
def test_without_a_token_to_generate_the_prompt_is_scored_up_to_the_whole_context(num_prompt):
    prompt = (*STEMS[0], *range(100, 110))[:num_prompt]
    params = SamplingParams(0, prompt_logprobs=3, logprobs=3)
    served = Served(CONFIG)
    served.engine.submit(Request("a", prompt, params, arrival_s=0.0))
    served.run()
    (event,) = served.events["a"]
    assert (event.finish_reason, event.token_ids, event.text, event.logprobs) == ("length", (), "", ())
    check([event], prompt, params)
