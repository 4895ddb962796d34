"""Embeddings through the engine: whatever is chunked, shared or preempted, each prompt's own vector."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.plan import Row
from jaxserve.errors import ConfigError, ContextLengthError, QueueFullError, RequestError
from jaxserve.types import Event, Pooling, Request, SamplingParams
from tests.engine.oracle import answer
from tests.engine.test_serving import MODEL, TOKENIZER, Served

STEMS = (tuple(range(10, 60)), (7,) * 50)  # prompts begin alike
ALONE = SamplingParams(0, temperature=0.0)
POOLINGS: tuple[Pooling, ...] = ("last", "mean")


@dataclass(frozen=True)
class Job:
    turn: int  # at which it arrives
    prompt_ids: tuple[int, ...]
    max_tokens: int  # 0: embed the prompt
    preempt_after: int | None  # turns from its arrival
    abort_after: int | None

    def request(self, number: int) -> Request:
        embeds = self.max_tokens == 0
        params = ALONE if embeds else SamplingParams(self.max_tokens, seed=1)
        return Request(str(number), self.prompt_ids, params, arrival_s=0.0, embeds=embeds)


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
        pooling=draw(st.sampled_from(POOLINGS)),
        **draw(st.sampled_from([{}, {"decode_steps": 4}, {"deterministic": True}])),
    )
    jobs = []
    for _ in range(draw(st.integers(1, 6))):
        own = draw(st.lists(st.integers(5, 8), min_size=1, max_size=4))
        prompt = (*draw(st.sampled_from(STEMS))[: draw(st.integers(0, 50))], *own)
        max_tokens = draw(st.sampled_from([0, 0, min(5, 60 - len(prompt))]))
        jobs.append(
            Job(
                draw(st.integers(0, 12)), prompt, max_tokens,
                draw(st.sampled_from([None, 1, 2, 3, 5, 8])), draw(st.sampled_from([None, None, None, 1, 3])),
            )
        )  # fmt: skip
    return config, jobs


def run(config: EngineConfig, jobs: list[Job]) -> Served:
    served = Served(config, expected_output=0.0)
    for turn in range(24):
        for n, job in enumerate(jobs):
            if job.turn == turn:
                served.engine.submit(job.request(n))
            if job.abort_after is not None and job.turn + job.abort_after == turn:
                served.engine.abort(str(n))
            if job.preempt_after is not None and job.turn + job.preempt_after == turn:
                for seq in list(served.scheduler._running()):
                    if seq.request.request_id == str(n):
                        served.scheduler.preempt(seq)
        served.turn()
    served.run()
    return served


def check_embedding(event: Event, prompt: tuple[int, ...], pooling: Pooling) -> None:
    assert (event.finish_reason, event.token_ids, event.text) == ("length", (), "")
    assert (event.num_prompt_tokens, event.num_output_tokens) == (len(prompt), 0)
    assert event.embedding is not None
    assert event.embedding.dtype == np.float32
    assert not event.embedding.flags.writeable
    np.testing.assert_allclose(event.embedding, MODEL.embedding(prompt, pooling), rtol=1e-6)


def rows(served: Served) -> list[Row]:
    return [row for plan in served.runner.plans for step in plan.steps for row in step.rows]


@settings(max_examples=60)
@given(workloads())
def test_every_prompt_gets_the_vector_that_it_gets_alone(workload):
    config, jobs = workload
    served = run(config, jobs)
    for n, job in enumerate(jobs):
        events = served.events[str(n)]
        if events[-1].finish_reason == "abort":
            assert job.abort_after is not None
        elif job.max_tokens:
            ids = tuple(token_id for event in events for token_id in event.token_ids)
            params = job.request(n).params
            assert ids == answer(MODEL.alone(job.prompt_ids, params), params, TOKENIZER).token_ids
            assert all(event.embedding is None for event in events)
        else:
            [event] = events
            check_embedding(event, job.prompt_ids, config.pooling)


CONFIG = EngineConfig(
    max_model_len=60, num_pages=60, page_size=4, max_num_seqs=4, max_prefill_tokens=8, min_prefill_queries=4,
    decode_steps=4,
)  # fmt: skip
PROMPT = STEMS[0][:30]


def embed(served: Served, name: str, prompt: tuple[int, ...] = PROMPT) -> Event:
    served.engine.submit(Request(name, prompt, ALONE, arrival_s=0.0, embeds=True))
    served.run()
    [event] = served.events[name]
    return event


@pytest.mark.parametrize("pooling", POOLINGS)
@pytest.mark.parametrize("num_prompt", [1, 4, 30, 60])
def test_a_prompt_up_to_the_whole_context_is_embedded_without_a_decode_step(pooling, num_prompt):
    prompt = (*STEMS[0], *range(100, 110))[:num_prompt]
    served = Served(replace(CONFIG, pooling=pooling))
    check_embedding(embed(served, "a", prompt), prompt, pooling)
    assert all(step.kind == "prefill" for plan in served.runner.plans for step in plan.steps)


@pytest.mark.parametrize(("pooling", "num_cached"), [("last", 28), ("mean", 0)])
def test_a_mean_is_over_what_is_computed_and_takes_nothing_from_the_cache(pooling, num_cached):
    served = Served(replace(CONFIG, pooling=pooling))
    served.engine.submit(Request("first", PROMPT, SamplingParams(1, seed=0), arrival_s=0.0))
    served.run()
    event = embed(served, "embedded")
    check_embedding(event, PROMPT, pooling)
    assert event.num_cached_tokens == num_cached
    served.engine.submit(Request("last", PROMPT, SamplingParams(1, seed=0), arrival_s=0.0))
    served.run()
    assert served.events["last"][-1].num_cached_tokens == 28  # what an embedding computed is shared as ever


@pytest.mark.parametrize(("page_size", "then"), [(4, [(16, 8), (24, 6)]), (3, [(15, 7), (23, 7)])])
def test_after_a_preemption_what_is_pooled_comes_from_the_cache_and_is_not_pooled_again(page_size, then):
    served = Served(replace(CONFIG, pooling="mean", page_size=page_size))
    served.engine.submit(Request("a", PROMPT, ALONE, arrival_s=0.0, embeds=True))
    for _ in range(2):  # two chunks of 8
        served.turn()
    [seq] = served.scheduler._running()
    served.scheduler.preempt(seq)
    served.run()
    check_embedding(served.events["a"][0], PROMPT, "mean")
    assert [(row.start, row.num_pooled) for row in rows(served)] == [(0, 8), (8, 8), *then]


def test_other_requests_pool_nothing():
    served = Served(CONFIG)
    served.engine.submit(Request("a", PROMPT, SamplingParams(3, seed=0), arrival_s=0.0))
    served.engine.submit(Request("b", PROMPT, SamplingParams(0, prompt_logprobs=1), arrival_s=0.0))
    served.run()
    assert not any(row.num_pooled for row in rows(served))


@pytest.mark.parametrize("wrong", [np.nan, np.inf, 0.0])
def test_hidden_states_without_a_direction_end_their_request_alone(monkeypatch, wrong):
    hidden = MODEL.hidden

    def broken(self, context):
        return hidden(context) * 0 + np.float32(wrong) if 9 in context else hidden(context)

    monkeypatch.setattr(type(MODEL), "hidden", broken)
    served = Served(CONFIG)
    for name, prompt in {"bad": (8, 9, 8), "good": (8, 8, 8)}.items():
        served.engine.submit(Request(name, prompt, ALONE, arrival_s=0.0, embeds=True))
    served.run()
    [bad] = served.events["bad"]
    assert bad.finish_reason == "error"
    assert bad.error is not None
    assert "no embedding" in bad.error
    check_embedding(served.events["good"][0], (8, 8, 8), "last")


def test_limits_hold_for_embeddings_too():
    small = replace(CONFIG, max_num_queued=0, max_num_seqs=1, decode_buckets=(), prefill_buckets=())
    served = Served(small)
    engine = served.engine
    with pytest.raises(ContextLengthError, match="60 tokens"):
        engine.submit(Request("a", (5,) * 61, ALONE, arrival_s=0.0, embeds=True))
    with pytest.raises(RequestError, match="max_tokens=1 must be 0"):
        engine.submit(Request("a", (5,), SamplingParams(1), arrival_s=0.0, embeds=True))
    engine.submit(Request("a", (5,), ALONE, arrival_s=0.0, embeds=True))
    with pytest.raises(QueueFullError):
        engine.submit(Request("b", (5,), ALONE, arrival_s=0.0, embeds=True))
    served.run()
    with pytest.raises(ConfigError, match="pooling='max' must be one of last, mean"):
        replace(CONFIG, pooling="max")  # type: ignore[arg-type]
