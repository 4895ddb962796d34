"""Several answers to one prompt: the prompt is computed once, and each answer is as if alone."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.config import EngineConfig
from jaxserve.types import Request, SamplingParams
from tests.engine.test_serving import Served, config
from tests.fakes import FakeModel

MODEL = FakeModel()


def siblings(prompt: tuple[int, ...], count: int, max_tokens: int = 5, group: str = "g") -> list[Request]:
    return [
        Request(f"{group}-{i}", prompt, SamplingParams(max_tokens, seed=i), 0.0, group=group)
        for i in range(count)
    ]


def num_prefilled(served: Served) -> int:
    """Prompt tokens that the device worked on."""
    steps = [step for plan in served.runner.plans for step in plan.steps if step.kind == "prefill"]
    return sum(row.query_len for step in steps for row in step.rows)


def check_answers(served: Served, requests: list[Request]) -> None:
    for request in requests:
        ids = [i for event in served.events[request.request_id] for i in event.token_ids]
        assert ids == MODEL.alone(request.prompt_ids, request.params)


def run(settings: EngineConfig, requests: list[Request], turns_between: int = 0) -> Served:
    served = Served(settings, MODEL)
    for request in requests:
        served.engine.submit(request)
        for _ in range(turns_between):
            served.turn()
    served.run()
    check_answers(served, requests)
    return served


def once(prompt_len: int, count: int, page_size: int) -> int:
    """Each full page once; what comes after them, and the last token in any case, for each sibling."""
    shared = (prompt_len - 1) // page_size * page_size
    return shared + count * (prompt_len - shared)


@pytest.mark.parametrize("turns_between", [0, 1, 3])
@pytest.mark.parametrize("prompt_len", [1, 3, 4, 5, 8, 17, 18, 20, 21])
def test_siblings_compute_each_full_page_of_their_prompt_once(prompt_len, turns_between):
    prompt = tuple(range(10, 10 + prompt_len))
    for max_prefill_tokens in (6, 64):
        settings = config(max_num_seqs=5, max_prefill_tokens=max_prefill_tokens)
        served = run(settings, siblings(prompt, 5), turns_between)
        assert num_prefilled(served) == once(prompt_len, 5, settings.page_size)
        first, *others = (served.events[f"g-{i}"][-1].num_cached_tokens for i in range(5))
        assert first == 0
        assert others == [(prompt_len - 1) // settings.page_size * settings.page_size] * 4


def test_siblings_that_find_no_slot_share_what_the_others_left():
    prompt = tuple(range(10, 28))
    served = run(config(max_num_seqs=2), siblings(prompt, 7))
    assert num_prefilled(served) == once(18, 7, served.config.page_size)


def test_siblings_of_one_token_answers_share_pages_that_nobody_holds_any_more():
    prompt = tuple(range(10, 28))
    served = run(config(max_num_seqs=4), siblings(prompt, 4, max_tokens=1))
    assert num_prefilled(served) == once(18, 4, served.config.page_size)


def test_without_a_group_the_same_requests_compute_their_prompt_each():
    prompt = tuple(range(10, 28))
    alike = [replace(request, group=None) for request in siblings(prompt, 3)]
    assert num_prefilled(run(config(max_num_seqs=3, max_prefill_tokens=64), alike)) > once(18, 3, 4)


def test_siblings_that_wait_hold_up_nobody_behind_them():
    other = Request("other", (7, 8, 9), SamplingParams(2), 0.0)
    requests = [*siblings(tuple(range(10, 28)), 3), other]
    served = run(config(max_num_seqs=4, max_prefill_tokens=64), requests)
    assert [row.slot for row in served.runner.plans[0].steps[0].rows] == [0, 3]


def test_when_the_first_is_aborted_the_next_computes_the_rest():
    prompt = tuple(range(10, 40))
    served = Served(config(max_num_seqs=3, max_prefill_tokens=8), MODEL)
    requests = siblings(prompt, 3)
    for request in requests:
        served.engine.submit(request)
    served.turn()
    served.engine.abort("g-0")
    served.run()
    check_answers(served, requests[1:])
    assert num_prefilled(served) <= once(30, 3, served.config.page_size)


def test_when_the_first_is_preempted_the_prompt_is_still_computed_for_all_at_once():
    prompt = tuple(range(10, 40))
    served = Served(config(max_num_seqs=3, max_prefill_tokens=8), MODEL)
    requests = siblings(prompt, 3)
    for request in requests:
        served.engine.submit(request)
    served.turn()
    served.scheduler.preempt(served.scheduler._prefilling[0])
    served.run()
    check_answers(served, requests)
    assert num_prefilled(served) <= once(30, 3, served.config.page_size) + 8


def test_without_a_prefix_cache_siblings_do_not_wait():
    served = run(config(max_num_seqs=3, enable_prefix_caching=False), siblings(tuple(range(10, 28)), 3))
    assert num_prefilled(served) == 3 * 18


@settings(max_examples=25)
@given(st.data())
def test_whatever_the_limits_siblings_end_and_answer_as_if_alone(data):
    page_size = data.draw(st.integers(1, 6))
    limits = EngineConfig(
        max_model_len=48,
        page_size=page_size,
        num_pages=1 + -(-48 // page_size) * data.draw(st.integers(1, 3)),
        max_num_seqs=data.draw(st.integers(1, 5)),
        max_prefill_tokens=data.draw(st.sampled_from([4, 8, 32])),
        min_prefill_queries=4,
        admission=data.draw(st.sampled_from(["optimistic", "reserve"])),
        prefix_alignment=data.draw(st.sampled_from([None, 2 * page_size])),
    )
    served = Served(limits, MODEL, expected_output=data.draw(st.sampled_from([0.0, 10.0])))
    requests = []
    for group in "abc":
        prompt = tuple(range(10, 10 + data.draw(st.integers(1, 30))))
        requests += siblings(prompt, data.draw(st.integers(1, 4)), data.draw(st.integers(1, 18)), group)
    aborted = data.draw(st.sampled_from([None, "a-0", "b-1"]))
    for request in requests:
        served.engine.submit(request)
        if data.draw(st.booleans()):
            served.turn()
    if aborted is not None:
        served.engine.abort(aborted)
    served.run()
    check_answers(served, [request for request in requests if request.request_id != aborted])
