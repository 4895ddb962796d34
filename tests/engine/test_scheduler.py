from __future__ import annotations

from dataclasses import replace

import pytest

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.plan import Row, StepResult
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.sequence import SequenceState
from jaxserve.types import Request, SamplingParams

CONFIG = EngineConfig(
    max_model_len=40, page_size=4, num_pages=21, max_num_seqs=2, max_prefill_tokens=8, min_prefill_queries=4
)


def request(name: str, num_prompt: int, max_tokens: int) -> Request:
    return Request(name, tuple(range(10, 10 + num_prompt)), SamplingParams(max_tokens), arrival_s=0.0)


def launch(scheduler: Scheduler):
    scheduler.admit(now=1.0)
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(plan)
    scheduler.check()
    return plan.steps[0]


def test_deciding_changes_nothing():
    scheduler = Scheduler(CONFIG)
    scheduler.add(request("a", 6, 10))
    for _ in range(8):
        scheduler.admit(now=1.0)
        plan = scheduler.schedule()
        assert scheduler.schedule() == plan
        scheduler.check()
        scheduler.commit(plan)


def test_a_row_carries_what_its_slot_has_gained_and_no_more():
    scheduler = Scheduler(CONFIG)
    req = request("a", 10, 4)
    scheduler.add(req)
    steps = [launch(scheduler) for _ in range(5)]
    assert [(step.kind, step.batch, step.queries) for step in steps] == [
        ("prefill", 1, 8),
        ("prefill", 1, 4),
        *[("decode", 2, 1)] * 3,
    ]
    assert [step.rows for step in steps] == [
        (Row(0, 0, 8, req.prompt_ids[:8], 0, (1, 2), sample=False, params=req.params),),
        (Row(0, 8, 2, req.prompt_ids[8:], 2, (3,), sample=True, params=None),),
        (Row(0, 10, 1, None, 3, (), sample=True, params=None),),
        (Row(0, 11, 1, None, 3, (), sample=True, params=None),),
        (Row(0, 12, 1, None, 3, (4,), sample=True, params=None),),
    ]
    assert scheduler.schedule() is None
    assert not scheduler.has_work


def test_admission_holds_pages_for_the_longest_output_by_count_but_takes_none_early():
    scheduler = Scheduler(CONFIG)
    scheduler.add(request("a", 4, 33))  # 36 positions, 9 pages
    scheduler.add(request("b", 4, 36))  # 39 positions, 10 pages
    launch(scheduler)
    assert scheduler.num_pages_used == 2  # one each, for both prompts in one step
    assert (scheduler.num_waiting, scheduler.num_free_slots) == (0, 0)


def test_a_sequence_that_ends_by_length_leaves_its_slot_when_its_last_step_is_launched():
    scheduler = Scheduler(CONFIG)
    seq = scheduler.add(request("a", 4, 1))
    launch(scheduler)
    assert (seq.state, scheduler.num_free_slots, scheduler.num_pages_used) == (SequenceState.ENDING, 2, 0)
    assert list(scheduler.apply((StepResult((7,)),), now=2.0)) == [(seq, 7)]
    assert (seq.admitted_s, seq.first_token_s, seq.last_token_s) == (1.0, 2.0, 2.0)


def test_ids_of_a_slot_go_to_the_sequence_that_had_it_at_launch():
    scheduler = Scheduler(CONFIG)
    first = scheduler.add(request("a", 4, 1))
    launch(scheduler)
    second = scheduler.add(request("b", 4, 1))
    launch(scheduler)
    assert list(scheduler.apply((StepResult((7,)),), now=2.0)) == [(first, 7)]
    assert list(scheduler.apply((StepResult((8,)),), now=3.0)) == [(second, 8)]


def test_a_stale_row_of_a_finished_sequence_is_dropped():
    scheduler = Scheduler(CONFIG)
    seq = scheduler.add(request("a", 4, 9))
    launch(scheduler)
    launch(scheduler)
    assert list(scheduler.apply((StepResult((7,)),), now=2.0)) == [(seq, 7)]
    scheduler.finish(seq)
    assert (scheduler.num_free_slots, scheduler.num_pages_used, scheduler.has_work) == (2, 0, False)
    assert list(scheduler.apply((StepResult((8,)),), now=3.0)) == []
    assert seq.output_ids == [7]


def test_a_runner_that_answers_for_too_few_rows_is_caught():
    scheduler = Scheduler(CONFIG)
    scheduler.add(request("a", 4, 9))
    launch(scheduler)
    with pytest.raises(AssertionError, match="0 ids for 1 rows of a prefill step"):
        list(scheduler.apply((StepResult(()),), now=2.0))


def decoding(num_seqs: int = 2, max_tokens: int = 20, **changes) -> Scheduler:
    """A scheduler whose sequences all decode, with three steps a launch."""
    scheduler = Scheduler(replace(CONFIG, decode_steps=3, **changes))
    for number in range(num_seqs):
        scheduler.add(request(str(number), 4, max_tokens))
    assert launch(scheduler).kind == "prefill"
    return scheduler


def test_a_launch_of_several_steps_takes_the_pages_of_all_of_them():
    scheduler = decoding()
    first, second = launch(scheduler), launch(scheduler)
    assert [(step.batch, step.queries, step.iterations) for step in (first, second)] == [(2, 1, 3)] * 2
    assert [(row.start, row.query_len, len(row.new_pages)) for row in first.rows] == [(4, 3, 1)] * 2
    assert [(row.start, row.query_len, len(row.new_pages)) for row in second.rows] == [(7, 3, 1)] * 2


def test_a_row_of_several_steps_ends_at_its_length():
    scheduler = decoding(max_tokens=6)
    steps = [launch(scheduler) for _ in range(2)]
    assert [row.query_len for step in steps for row in step.rows] == [3, 3, 2, 2]
    assert not scheduler.has_work


def test_several_steps_share_a_launch_only_when_nobody_waits_and_nobody_prefills():
    scheduler = decoding(num_seqs=1)
    assert launch(scheduler).iterations == 3
    scheduler.add(request("new", 16, 9))  # finds its first page
    steps = [launch(scheduler) for _ in range(4)]
    assert [(step.kind, step.iterations) for step in steps] == [
        ("prefill", 1), ("decode", 1), ("prefill", 1), ("decode", 3),
    ]  # fmt: skip
    for name in ("waits", "waits too"):
        scheduler.add(request(name, 4, 9))
    assert launch(scheduler).iterations == 1


def test_without_pages_for_several_steps_there_is_one():
    scheduler = decoding(num_seqs=1)
    assert launch(scheduler).iterations == 3
    pool = scheduler._kv.pool
    room = pool.take(pool.num_free)  # the page at hand has room for one more token
    scheduler.admit(now=1.0)
    assert scheduler.schedule().steps[0].iterations == 1
    pool.free(room)
    assert launch(scheduler).iterations == 3


def test_rows_whose_logits_are_wanted_on_the_way_go_step_by_step():
    for wish in ({"logprobs": 0}, {"presence_penalty": 0.5}, {"min_tokens": 9}):
        scheduler = decoding(num_seqs=1)
        scheduler.add(Request("other", (7,) * 4, SamplingParams(20, **wish), arrival_s=0.0))
        steps = [launch(scheduler) for _ in range(5)]
        assert [step.iterations for step in steps if len(step.rows) == 2] == [1] * 3


def test_what_a_launch_sampled_behind_the_end_of_its_sequence_is_dropped():
    scheduler = decoding(num_seqs=1)
    launch(scheduler)
    (seq, first), = scheduler.apply((StepResult((7,)),), now=2.0)
    taken = []
    for owner, token_id in scheduler.apply((StepResult((8, 9, 10)),), now=3.0):
        taken.append(token_id)
        if token_id == 9:
            scheduler.finish(owner)
    assert (first, taken, seq.output_ids) == (7, [8, 9], [7, 8, 9])
    scheduler.check()
    assert scheduler.num_pages_used == 0
