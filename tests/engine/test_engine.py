"""The engine with its thread: many callers, and what it tells and refuses."""

from __future__ import annotations

import math
import threading
import time

import pytest

from jaxserve.engine.engine import Engine
from jaxserve.errors import ContextLengthError, QueueFullError, RequestError
from jaxserve.types import STEP_TIME_BOUNDS_S, Request, SamplingParams
from tests.engine.steered import CONFIG, PATIENCE_S, TOKENIZER, request
from tests.fakes import FakeModel, FakeRunner


def test_requests_from_several_threads_are_all_answered_as_if_alone(engine, inbox):
    def client(number: int) -> None:
        for turn in range(10):
            name = f"{number}.{turn}"
            while True:
                try:
                    engine.submit(request(name, 1 + number, 1 + turn, seed=turn))
                    break
                except QueueFullError:
                    time.sleep(0.001)
            inbox.last(name)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    for number in range(8):
        for turn in range(10):
            ids = [i for event in inbox.events[f"{number}.{turn}"] for i in event.token_ids]
            assert ids == FakeModel().alone((7,) * (1 + number), SamplingParams(1 + turn, seed=turn))
    assert engine.stats().num_pages_used == 0


def test_a_request_passes_its_stages_in_order(engine, inbox):
    engine.submit(request("a"))
    line = inbox.last("a").timeline
    times = [line.arrival_s, line.admitted_s, line.first_token_s, line.last_token_s, line.finished_s]
    assert times == sorted(times)
    assert all(event.timeline is None for event in inbox.events["a"][:-1])


def test_the_figures_show_what_runs_and_what_waits(inbox, runner):
    engine = Engine(CONFIG, runner, TOKENIZER, deliver=inbox.deliver)
    assert engine.stats().state == "starting"
    engine.start(in_thread=False)
    for number in range(6):
        engine.submit(request(str(number)))
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pages_used) == (0, 6, 0)
    engine.turn()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pages_used) == (4, 2, 2)
    assert (stats.num_pages_total, stats.num_steps) == (100, {"prefill": 1, "decode": 0})
    engine.submit(request("6"))
    assert engine.stats().num_waiting == 3
    while engine.turn():
        pass
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pages_used) == (0, 0, 0)


def test_the_figures_tell_waiting_for_the_device_from_work_of_the_host(inbox, runner):
    engine = Engine(CONFIG, runner, TOKENIZER, deliver=lambda events: time.sleep(0.03))
    engine.start(in_thread=False)
    fetch = runner.fetch
    runner.fetch = lambda handle: (time.sleep(0.01), fetch(handle))[1]
    engine.submit(request("a", 5, 4))
    while engine.turn():
        pass
    stats = engine.stats()
    assert 0.04 <= stats.device_wait_s < 0.1
    assert 0.09 <= stats.host_time_s < 0.09 + 0.1  # shown before the last events are delivered
    assert stats.device_wait_s <= stats.device_times.sum_s
    assert stats.host_times.sum_s >= 0.12
    assert sum(stats.device_times.counts) == sum(stats.num_steps.values()) == 4
    assert sum(stats.host_times.counts) == 5  # the last turn only reads


def test_a_steps_time_begins_when_it_is_launched_or_the_step_before_it_ends(monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    runner = FakeRunner(CONFIG)
    launch, fetch = runner.launch, runner.fetch
    engine = Engine(CONFIG, runner, TOKENIZER, deliver=lambda events: clock.__setitem__(0, clock[0] + 0.2))

    def advance(seconds, function):
        def called(argument):
            result = function(argument)
            clock[0] += seconds
            return result

        return called

    runner.launch, runner.fetch = advance(1.0, launch), advance(4.0, fetch)
    engine.start(in_thread=False)
    engine.submit(request("a", 1, 3))
    while engine.turn():
        pass
    # launches end at 1, 2, 7.2; ids are there at 6, 11.2, 15.4; 0.2 s go by after each.
    stats = engine.stats()
    assert stats.device_times.sum_s == pytest.approx(6.0 + (11.2 - 6.0) + (15.4 - 11.2))
    assert stats.host_times.sum_s == pytest.approx(3 * 1.0 + 3 * 0.2)
    counts = dict(zip((*STEP_TIME_BOUNDS_S, math.inf), stats.device_times.counts))
    assert {bound: n for bound, n in counts.items() if n} == {5.0: 1, 10.0: 2}


def test_a_full_queue_refuses_and_opens_again(inbox, runner):
    engine = Engine(CONFIG, runner, TOKENIZER, deliver=inbox.deliver)
    engine.start(in_thread=False)
    for number in range(4 + 3):  # four find a slot at the next turn
        engine.submit(request(str(number)))
    with pytest.raises(QueueFullError, match="7 requests are waiting already, the limit is max_num_queued=3"):
        engine.submit(request("too many"))
    engine.turn()
    with pytest.raises(QueueFullError, match="3 requests are waiting already"):
        engine.submit(request("too many"))
    engine.abort("6")
    engine.turn()
    engine.submit(request("later"))
    with pytest.raises(QueueFullError):
        engine.submit(request("too many"))
    while engine.turn():
        pass
    assert inbox.last("6").finish_reason == "abort"
    assert inbox.last("later").finish_reason == "length"
    assert "too many" not in inbox.events


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        (request("a", 0), RequestError, "prompt is empty.*maximum context length is 100 tokens"),
        (request("a", 100, 1), ContextLengthError, "maximum context length is 100 tokens.*has 100"),
        (request("a", 91, 10), ContextLengthError, "maximum context length is 100 tokens.*101.*lower.* 9"),
        (request("a", 5, -1), RequestError, "max_tokens=-1 must be at least 0"),
        (request("a", 101, 0), ContextLengthError, "prompt has 101"),
        (request("a", 5, logprobs=21), RequestError, "logprobs=21 must be from 0 to 20.*--max-logprobs"),
        (request("a", 5, prompt_logprobs=-1), RequestError, "prompt_logprobs=-1 must be from 0 to 20"),
        (request("a", stop=("",)), RequestError, "stop must not hold an empty string"),
        (
            request("a", stop_token_ids=frozenset({-1})),
            RequestError,
            "stop_token_ids: token id -1 is outside",
        ),
        (Request("a", (7, 999), SamplingParams(5), 0.0), RequestError, r"token id 999 is outside \[0, 269\)"),
    ],
)
def test_a_request_that_can_not_be_served_is_refused_at_once(engine, inbox, wrong, error, message):
    with pytest.raises(error, match=message):
        engine.submit(wrong)
    engine.submit(request("a", 90, 10))
    assert inbox.last("a").finish_reason == "length"


def test_an_id_in_use_is_refused(engine, runner):
    runner.gate.clear()
    engine.submit(request("a"))
    with pytest.raises(RequestError, match="request_id 'a'"):
        engine.submit(request("a"))


def test_an_abort_ends_a_running_request_and_an_unknown_one_is_ignored(engine, inbox, runner):
    runner.gate.clear()
    engine.submit(request("a", 5, 90))
    engine.submit(request("b", 5, 3))
    engine.abort("nobody")
    engine.abort("a")
    runner.gate.set()
    assert inbox.last("a").finish_reason == "abort"
    assert inbox.last("b").finish_reason == "length"
    engine.abort("a")
    assert len([event for event in inbox.events["a"] if event.finish_reason]) == 1
