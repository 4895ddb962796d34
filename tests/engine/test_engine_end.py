"""The engine with its thread: failures, draining, devices that hang, and idleness."""

from __future__ import annotations

import threading
import time
from dataclasses import replace

import pytest

from jaxserve.engine.engine import Engine
from jaxserve.errors import UnavailableError
from jaxserve.types import SamplingParams
from tests.engine.steered import CONFIG, PATIENCE_S, TOKENIZER, request
from tests.fakes import FakeModel, FakeTokenizer


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
