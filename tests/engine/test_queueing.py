"""Who waits for how long: limits of the queue, order, deadlines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.intake import LONGEST_RETRY_S, Intake
from jaxserve.engine.queue import AGEING_S, rank
from jaxserve.engine.throughput import WINDOW_S, Throughput
from jaxserve.errors import ConfigError, QueueFullError, RequestError
from jaxserve.types import EngineStats, Request, SamplingParams
from tests.engine.test_serving import Served, config, request
from tests.fakes import FakeModel, FakeRunner, FakeTokenizer

MODEL = FakeModel()


@pytest.fixture
def clock(monkeypatch):
    """`clock.now` is the time, for the engine."""

    class Clock:
        now = 100.0

    monkeypatch.setattr("jaxserve.engine.engine.time.monotonic", lambda: Clock.now)
    return Clock


def make(number: int, num_prompt: int = 8, max_tokens: int = 20, **fields) -> Request:
    plain = request(number, (5 + number,) * num_prompt, SamplingParams(max_tokens))
    return replace(plain, **{"arrival_s": 100.0, **fields})


def end_of(served: Served, number: int) -> str | None:
    events = served.events.get(str(number))
    return events[-1].finish_reason if events else None


# Limits.


def test_prompts_that_wait_are_bounded_by_their_tokens():
    served = Served(config(max_num_seqs=1, max_queued_tokens=100), MODEL)
    served.engine.submit(make(0, num_prompt=150))  # nobody waits: it may be as long as the context
    with pytest.raises(QueueFullError, match="150 prompt tokens are waiting already, 8 more") as caught:
        served.engine.submit(make(1))
    assert caught.value.code == "queue_tokens_full"
    served.turn()
    served.engine.submit(make(1, num_prompt=60))
    served.turn()
    assert served.engine.stats().num_queued_tokens == 60
    with pytest.raises(QueueFullError, match="60 prompt tokens are waiting already, 41 more"):
        served.engine.submit(make(2, num_prompt=41))
    served.engine.submit(make(2, num_prompt=40))
    assert served.engine.stats().num_queued_tokens == 100
    served.engine.abort("1")
    served.turn()
    assert served.engine.stats().num_queued_tokens == 40
    served.run()
    assert served.engine.stats().num_queued_tokens == 0
    assert [end_of(served, number) for number in range(3)] == ["length", "abort", "length"]


@pytest.mark.parametrize(
    ("stats", "seconds"),
    [
        (EngineStats(num_running=1, num_waiting=1, num_queued_tokens=90, mean_output=5, tokens_per_s=10), 10),
        (EngineStats(num_running=1, num_waiting=1, num_queued_tokens=91, mean_output=5, tokens_per_s=10), 11),
        (EngineStats(num_running=9, num_waiting=1, num_queued_tokens=0, mean_output=5, tokens_per_s=1e4), 1),
        (EngineStats(num_waiting=1, num_queued_tokens=9999, mean_output=5, tokens_per_s=1), LONGEST_RETRY_S),
        (EngineStats(num_waiting=1, num_queued_tokens=10, mean_output=5), 1),  # nothing measured yet
    ],
)
def test_a_full_queue_says_when_its_work_should_be_done_by_the_measured_pace(stats, seconds):
    intake = Intake(config(max_num_queued=0))
    intake.open()
    intake.publish(stats, 0, [])
    with pytest.raises(QueueFullError) as caught:
        intake.submit(make(0))
    assert caught.value.retry_after_s == seconds


def test_the_pace_is_that_of_late_and_idle_time_does_not_count(clock):
    pace = Throughput()
    assert pace.tokens_per_s == 0
    for _ in range(100):
        pace.add(10, 0.1)
    assert pace.tokens_per_s == pytest.approx(100)
    for _ in range(int(30 * WINDOW_S)):
        pace.add(50, 0.1)
    assert pace.tokens_per_s == pytest.approx(500, rel=0.05)

    served = Served(config(), MODEL)
    launch = served.runner.launch
    served.runner.launch = lambda plan: (setattr(clock, "now", clock.now + 0.5), launch(plan))[1]
    served.engine.submit(make(0, num_prompt=8, max_tokens=5))
    served.run()
    clock.now += 1000
    served.engine.submit(make(1, num_prompt=8, max_tokens=5))
    served.run()
    assert served.engine.stats().tokens_per_s == pytest.approx(12 / 2.5, rel=0.1)


def test_what_can_never_fit_is_refused_at_once():
    engine = Engine(config(), FakeRunner(config()), FakeTokenizer(), deliver=lambda events: None)
    engine.start(in_thread=False)
    with pytest.raises(RequestError, match="maximum context length is 200"):
        engine.submit(make(0, num_prompt=190, max_tokens=11))
    with pytest.raises(ConfigError, match="can't hold one sequence"):
        EngineConfig(max_model_len=64, num_pages=4)  # so whatever fits the context fits the pool


# Order.


def test_lower_priority_numbers_go_first_and_equal_ones_in_order():
    served = Served(config(max_num_seqs=1, scheduling_policy="priority"), MODEL)
    for number, priority in enumerate([0, 2, 1, -1, 1]):
        served.engine.submit(make(number, priority=priority))
    served.run()
    order = sorted(range(5), key=lambda number: served.events[str(number)][-1].timeline.admitted_s)
    assert order == [3, 0, 2, 4, 1]


@given(st.lists(st.tuples(st.integers(-3, 3), st.floats(0, 100)), min_size=2, max_size=20))
def test_who_has_waited_long_enough_is_in_front_of_everybody_who_comes(requests):
    ranks = [
        rank(make(0, priority=priority, arrival_s=arrival_s), number, "priority")
        for number, (priority, arrival_s) in enumerate(requests)
    ]
    for (priority, arrival_s), place in zip(requests, ranks):
        for (other_priority, other_arrival_s), other_place in zip(requests, ranks):
            if other_arrival_s - arrival_s > (priority - other_priority) * AGEING_S + 1e-6:
                assert place < other_place
    assert len(set(ranks)) == len(ranks)


def test_a_priority_that_would_have_no_effect_is_refused():
    served = Served(config(), MODEL)
    with pytest.raises(RequestError, match=r"priority=3 has no effect.*--scheduling-policy"):
        served.engine.submit(make(0, priority=3))


def test_the_lowest_priority_is_preempted_first():
    limits = config(max_model_len=64, num_pages=20, scheduling_policy="priority")
    served = Served(limits, MODEL, expected_output=0.0)
    for number, priority in enumerate([0, 5, 1]):
        served.engine.submit(make(number, num_prompt=8 + 4 * (number == 1), max_tokens=40, priority=priority))
    while not served.scheduler.num_preemptions:
        served.turn()
    assert [seq.request.request_id for seq in served.scheduler._waiting] == ["1"]
    served.run()
    for number in range(3):
        assert end_of(served, number) == "length"


# Deadlines.


@pytest.mark.parametrize(("number", "state"), [(0, "decode"), (1, "preempted"), (2, "waiting")])
@pytest.mark.parametrize("how", ["abort", "timeout"])
def test_slot_and_pages_are_back_at_the_next_turn_in_whatever_state_a_request_ends(clock, number, state, how):
    served = Served(config(max_model_len=64, num_pages=20, max_num_seqs=2), MODEL, expected_output=0.0)
    timeouts = {number: 5.0} if how == "timeout" else {}
    for early in range(2):
        served.engine.submit(make(early, max_tokens=50, timeout_s=timeouts.get(early)))
    while not served.scheduler.num_preemptions:
        served.turn()
    served.engine.submit(make(2, max_tokens=50, timeout_s=timeouts.get(2)))
    served.turn()
    seq = served.engine._live[str(number)]
    assert seq.state.value == state
    if how == "abort":
        served.engine.abort(str(number))
    clock.now += 5
    served.turn()
    assert end_of(served, number) == how
    assert (seq.slot, seq.pages) == (None, [])
    assert seq not in served.scheduler._waiting
    served.run()
    assert [end_of(served, other) for other in range(3) if other != number] == ["length"] * 2


@pytest.mark.parametrize("how", ["abort", "timeout"])
def test_a_request_that_ends_in_the_middle_of_its_prompt_gives_its_pages_back(clock, how):
    served = Served(config(), MODEL)
    served.engine.submit(make(0, num_prompt=100, timeout_s=5.0))
    for _ in range(3):
        served.turn()
    assert served.engine.stats().num_pages_used == 12
    if how == "abort":
        served.engine.abort("0")
    else:
        clock.now += 5
    served.turn()
    assert end_of(served, 0) == how
    assert served.engine.stats().num_pages_used == 0
    served.run()


def test_a_timeout_says_how_far_the_request_came(clock):
    served = Served(config(max_num_seqs=1), MODEL)
    for number in range(2):
        served.engine.submit(make(number, max_tokens=50, timeout_s=5.0))
    for _ in range(4):
        served.turn()
    clock.now += 4.9
    served.turn()
    assert end_of(served, 0) is end_of(served, 1) is None
    clock.now += 0.2
    served.turn()
    assert served.events["0"][-1].error == "the request's timeout of 5 s has passed, after 4 tokens"
    assert served.events["1"][-1].error == "the request's timeout of 5 s has passed, still in the queue"
    served.run()


def test_the_limit_of_waiting_does_not_touch_those_who_run(clock):
    served = Served(config(max_num_seqs=1, queue_timeout_s=3.0), MODEL)
    for number in range(2):
        served.engine.submit(make(number))
    served.turn()
    clock.now += 3
    served.engine.submit(make(2, arrival_s=clock.now))
    served.turn()
    assert served.events["1"][-1].error == (
        "the request has waited 3 s for its turn, the server's limit is 3 s"
    )
    assert served.events["1"][-1].timeline.admitted_s is None
    served.run()
    assert [end_of(served, number) for number in range(3)] == ["length", "timeout", "length"]


def test_a_deadline_of_a_request_that_has_ended_does_not_touch_a_later_one_of_the_same_id(clock):
    served = Served(config(), MODEL)
    served.engine.submit(make(0, max_tokens=2, timeout_s=5.0))
    served.engine.submit(make(1, max_tokens=100))
    for _ in range(6):
        served.turn()
    assert end_of(served, 0) == "length"
    clock.now += 4
    served.engine.submit(make(0, max_tokens=50, timeout_s=5.0, arrival_s=clock.now))
    clock.now += 2
    served.run()
    assert end_of(served, 0) == "length"


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"queue_timeout_s": 0}, "queue_timeout_s=0 must be a number of seconds above 0"),
        ({"max_queued_tokens": -1}, "max_queued_tokens=-1 must be a whole number of at least 1"),
        ({"scheduling_policy": "lifo"}, "scheduling_policy='lifo' must be one of fcfs, priority"),
        ({"admission": "hopeful"}, "admission='hopeful' must be one of optimistic, reserve"),
    ],
)
def test_limits_that_can_not_be_are_refused(changes, text):
    with pytest.raises(ConfigError, match=text):
        config(**changes)
