"""The engine with its thread: many callers, failures, and the end of it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.errors import ContextLengthError, QueueFullError, RequestError, UnavailableError
from jaxserve.types import STEP_TIME_BOUNDS_S, Event, Request, SamplingParams
from tests.fakes import FakeModel, FakeRunner, FakeTokenizer

TOKENIZER = FakeTokenizer()
CONFIG = EngineConfig(
    max_model_len=100, page_size=4, num_pages=101, max_num_seqs=4, max_num_queued=3, max_prefill_tokens=32
)
PATIENCE_S = 20.0


class Inbox:
    """Collects events, lets tests wait for them, and can be made to block or to fail."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.events: dict[str, list[Event]] = {}
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None

    def deliver(self, events: list[Event]) -> None:
        assert self.gate.wait(PATIENCE_S)
        if self.error is not None:
            raise self.error
        with self.changed:
            for event in events:
                self.events.setdefault(event.request_id, []).append(event)
            self.changed.notify_all()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        with self.changed:
            assert self.changed.wait_for(condition, PATIENCE_S), f"still waiting; have {self.events}"

    def last(self, request_id: str) -> Event:
        self.wait_for(lambda: self.ended(request_id))
        return self.events[request_id][-1]

    def ended(self, request_id: str) -> bool:
        events = self.events.get(request_id)
        return bool(events) and events[-1].finish_reason is not None


class SteeredRunner(FakeRunner):
    """A device that can stand still, and fail on demand."""

    def __init__(self) -> None:
        super().__init__(CONFIG, FakeModel())
        self.gate = threading.Event()
        self.gate.set()
        self.launch_error: BaseException | None = None
        self.fetch_error: BaseException | None = None

    def launch(self, plan):
        if self.launch_error is not None:
            raise self.launch_error
        return super().launch(plan)

    def fetch(self, handle):
        assert self.gate.wait(PATIENCE_S)
        if self.fetch_error is not None:
            raise self.fetch_error
        return super().fetch(handle)


@pytest.fixture
def inbox() -> Inbox:
    return Inbox()


@pytest.fixture
def runner() -> SteeredRunner:
    return SteeredRunner()


@pytest.fixture
def engine(inbox: Inbox, runner: SteeredRunner) -> Iterator[Engine]:
    others = set(threading.enumerate())  # of servers that other tests share
    engine = Engine(CONFIG, runner, TOKENIZER, deliver=inbox.deliver, vocab_size=TOKENIZER.vocab_size)
    engine.start()
    yield engine
    runner.gate.set()
    inbox.gate.set()
    engine.stop()
    left = {thread.name for thread in set(threading.enumerate()) - others}
    assert not {"jaxserve-engine", "jaxserve-watchdog"} & left


def request(name: str, num_prompt: int = 5, max_tokens: int = 10, **params) -> Request:
    return Request(name, (7,) * num_prompt, SamplingParams(max_tokens, **params), time.monotonic())


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


class BrokenTokenizer(FakeTokenizer):
    """Fails on one id, which the model picks for some requests."""

    def token_bytes(self, token_id: int) -> bytes:
        if token_id == 3 + ord("e"):
            raise ValueError("no bytes for this one")
        return super().token_bytes(token_id)


def test_a_failure_in_the_text_of_one_request_ends_that_request_only(inbox, runner):
    engine = Engine(CONFIG, runner, BrokenTokenizer(), deliver=inbox.deliver)
    engine.start(in_thread=False)
    for number in range(7):
        engine.submit(request(str(number), seed=number))
    while engine.turn():
        engine._scheduler.check()
    fated = [
        3 + ord("e") in FakeModel().alone((7,) * 5, SamplingParams(10, seed=number)) for number in range(7)
    ]
    assert 0 < sum(fated) < 7
    for number in range(7):
        last = inbox.last(str(number))
        assert last.finish_reason == ("error" if fated[number] else "length")
        assert last.error == ("ValueError: no bytes for this one" if fated[number] else None)
        assert last.timeline is not None
    assert engine.stats().state == "ready"
    assert engine.stats().num_pages_used == 0


@pytest.mark.parametrize("where", ["launch", "fetch"])
@pytest.mark.parametrize("error", [RuntimeError("device lost"), AssertionError("device lost")])
def test_a_failure_of_the_device_ends_every_request_with_the_reason_and_then_the_engine(
    engine, inbox, runner, where, error
):
    runner.gate.clear()
    for number in range(7):  # running, waiting
        engine.submit(request(str(number), 5, 90))
    setattr(runner, f"{where}_error", error)
    runner.gate.set()
    for number in range(7):
        last = inbox.last(str(number))
        assert last.finish_reason == "error"
        assert "device lost" in last.error
        assert last.num_prompt_tokens == 5
        assert last.timeline.finished_s is not None
    stats = engine.stats()
    assert (stats.state, stats.num_running, stats.num_waiting) == ("dead", 0, 0)
    assert "device lost" in stats.reason
    with pytest.raises(UnavailableError, match=r"dead: .*device lost"):
        engine.submit(request("late"))
    engine.abort("0")
    assert engine.drain(0)
    assert engine.turn() is False


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_not_even_an_exit_from_the_device_leaves_a_client_waiting(engine, inbox, runner):
    runner.launch_error = SystemExit(3)
    engine.submit(request("a"))
    assert inbox.last("a").finish_reason == "error"
    assert engine.stats().state == "dead"


def test_a_failure_to_deliver_ends_the_engine_and_hangs_nobody(engine, inbox):
    inbox.error = RuntimeError("loop is closed")
    engine.submit(request("a", 5, 90))
    assert engine.drain(PATIENCE_S)
    assert engine.stats().state == "dead"
    assert "loop is closed" in engine.stats().reason


def test_a_slow_receiver_holds_up_no_caller(engine, inbox):
    inbox.gate.clear()
    engine.submit(request("a"))
    began_s = time.monotonic()
    while engine.stats().num_steps.get("decode", 0) < 1:
        time.sleep(0.001)
    engine.submit(request("b"))
    engine.abort("b")
    engine.stats()
    assert time.monotonic() - began_s < PATIENCE_S / 2
    inbox.gate.set()
    assert inbox.last("a").finish_reason == "length"
    assert inbox.last("b").finish_reason in ("abort", "length")


def test_draining_lets_all_at_hand_end_and_refuses_others(engine, inbox, runner):
    runner.gate.clear()
    for number in range(6):
        engine.submit(request(str(number)))
    drained: list[bool] = []
    thread = threading.Thread(target=lambda: drained.append(engine.drain(PATIENCE_S)))
    thread.start()
    while engine.stats().state != "draining":
        time.sleep(0.001)
    with pytest.raises(UnavailableError, match="draining"):
        engine.submit(request("late"))
    runner.gate.set()
    thread.join(PATIENCE_S)
    assert drained == [True]
    assert [inbox.events[str(number)][-1].finish_reason for number in range(6)] == ["length"] * 6


def test_what_is_left_when_draining_times_out_is_aborted_and_told(engine, inbox, runner):
    fetch = runner.fetch
    runner.fetch = lambda handle: (time.sleep(0.02), fetch(handle))[1]
    for number in range(6):
        engine.submit(request(str(number), 5, 90))
    assert not engine.drain(0.1)
    assert [inbox.events[str(number)][-1].finish_reason for number in range(6)] == ["abort"] * 6
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pages_used) == (0, 0, 0)


def test_draining_again_brings_the_deadline_forward(engine, inbox, runner):
    fetch = runner.fetch
    runner.fetch = lambda handle: (time.sleep(0.02), fetch(handle))[1]
    engine.submit(request("a", 5, 90))
    patient = threading.Thread(target=engine.drain, args=(60,))
    patient.start()
    engine.drain(0)
    patient.join(PATIENCE_S)
    assert not patient.is_alive()
    assert inbox.last("a").finish_reason == "abort"


def test_a_device_that_hangs_keeps_no_client_and_no_process(engine, inbox, runner, monkeypatch):
    monkeypatch.setattr("jaxserve.engine.engine.GRACE_S", 0.1)
    runner.gate.clear()
    for number in range(6):
        engine.submit(request(str(number)))
    while not engine.stats().num_steps.get("prefill"):
        time.sleep(0.001)
    assert not engine.stop(0)
    told = {str(number): inbox.last(str(number)) for number in range(6)}
    assert {event.finish_reason for event in told.values()} <= {"error", "abort"}
    assert "did not answer" in told["0"].error
    runner.gate.set()
    engine._thread.join(PATIENCE_S)
    assert {name: events[-1] for name, events in inbox.events.items()} == told


def test_an_engine_without_a_thread_drains_too(inbox, runner):
    engine = Engine(CONFIG, runner, TOKENIZER, deliver=inbox.deliver)
    with pytest.raises(UnavailableError, match="starting"):
        engine.submit(request("a"))
    engine.start(in_thread=False)
    engine.submit(request("a"))
    assert engine.stop(PATIENCE_S)
    assert inbox.last("a").finish_reason == "length"
    assert (engine.stats().state, engine.stats().reason) == ("dead", "stopped")


def test_an_idle_engine_sleeps(engine, inbox):
    engine.submit(request("a"))
    inbox.last("a")
    time.sleep(0.05)
    turns: list[bool] = []
    turn = engine.turn
    engine.turn = lambda: turns.append(turn()) or turns[-1]
    time.sleep(0.1)
    assert turns == []
    engine.submit(request("b"))
    assert inbox.last("b").finish_reason == "length"


def test_a_step_that_takes_far_too_long_is_logged_and_counted_once_and_goes_on(inbox, runner, caplog):
    config = replace(CONFIG, step_timeout_s=0.05)
    engine = Engine(config, runner, TOKENIZER, deliver=inbox.deliver)
    engine.start()
    engine.submit(request("quick"))
    inbox.last("quick")
    time.sleep(0.2)  # idle is not slow
    assert engine.stats().num_slow_steps == 0
    runner.gate.clear()
    engine.submit(request("slow"))
    deadline_s = time.monotonic() + PATIENCE_S
    while not engine.stats().num_slow_steps and time.monotonic() < deadline_s:
        time.sleep(0.01)
    time.sleep(0.2)
    runner.gate.set()
    assert inbox.last("slow").finish_reason == "length"
    assert engine.stats().num_slow_steps == 1
    assert engine.stats().state == "ready"
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "the limit is 0.05 s (--step-timeout)" in caplog.text
    engine.stop()


@pytest.mark.parametrize(
    ("damage", "text"),
    [
        (lambda scheduler: scheduler._kv.pool.take(1), "only 99 of 100 pages are free"),
        (lambda scheduler: scheduler._free_slots.pop(0), "only 3 of 4 slots are free"),
        (lambda scheduler: setattr(scheduler._kv, "num_reserved", 2), "2 pages are held back for nobody"),
    ],
)
def test_an_idle_engine_that_misses_something_says_so_and_goes_on(inbox, runner, caplog, damage, text):
    engine = Engine(CONFIG, runner, TOKENIZER, deliver=inbox.deliver)
    engine.start(in_thread=False)
    for name in ("a", "b", "c"):
        engine.submit(request(name, seed=len(name)))
        while engine.turn():
            pass
        assert inbox.last(name).finish_reason == "length"
        if name == "a":
            assert engine.stats().num_faults == 0
            damage(engine._scheduler)
    assert engine.stats().num_faults == 2
    assert text in caplog.text
