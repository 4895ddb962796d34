"""The loop that turns requests into events."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.deadlines import Deadlines
from jaxserve.engine.events import figures_of, last_event, token_event
from jaxserve.engine.grammars import Grammars
from jaxserve.engine.intake import Intake
from jaxserve.engine.output import OutputProcessor
from jaxserve.engine.plan import Runner, Step, StepResult
from jaxserve.engine.pooling import unit_vector
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.sequence import Sequence
from jaxserve.engine.step_times import StepTimes
from jaxserve.engine.throughput import Throughput
from jaxserve.engine.validation import check_request
from jaxserve.engine.watchdog import Watchdog
from jaxserve.errors import GrammarLimitError
from jaxserve.tokenizer.base import Tokenizer
from jaxserve.types import EngineStats, Event, FinishReason, Request

logger = logging.getLogger(__name__)

DIVERGED = "the answer could not be repeated after a preemption: the device is not deterministic"
NO_DIRECTION = "the prompt has no embedding: its hidden states are not finite, or all zero"
GRACE_S = 10.0  # how long past a deadline the engine thread may be held up by the device


class Engine:
    """Takes requests from any thread, runs them on one device, delivers their events.

    `deliver` is called at most once a turn, from the engine thread, with the events of that turn; it
    should hand them on and return. The last event of a request has a `finish_reason`, and every request
    that `submit` took gets one: "abort" when it was aborted, "timeout" when a deadline passed, "grammar"
    when its grammar takes too much work, "error" when its text can't be made or when the engine dies.

    A turn launches the next step before it reads the ids of the one before, so the device works while
    the host does. Where a row of that step has a grammar, the ids are read behind the step's forward pass and
    before its sampler. `eos_ids` defaults to the tokenizer's; with `vocab_size`, ids beyond it are refused.
    `on_stop` is called at the end of `stop`, by each call of it.
    """

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        tokenizer: Tokenizer,
        *,
        deliver: Callable[[list[Event]], None],
        eos_ids: frozenset[int] | None = None,
        vocab_size: int | None = None,
        on_stop: Callable[[], None] = lambda: None,
    ):
        self._config = config
        self._runner = runner
        self._tokenizer = tokenizer
        self._deliver = deliver
        self._eos_ids = tokenizer.eos_ids if eos_ids is None else eos_ids
        self._vocab_size = vocab_size
        self._on_stop = on_stop
        self._intake = Intake(config)
        self._thread: threading.Thread | None = None
        self._turn_began_s: float | None = None  # None between turns
        self._watchdog = Watchdog(config.step_timeout_s, lambda: self._turn_began_s)
        # From here on owned by the engine thread.
        self._scheduler = Scheduler(config, self._eos_ids)
        self._live: dict[str, Sequence] = {}  # requests that have not ended
        self._whole_texts: dict[int, str] = {}  # of tokens, for all detokenizers
        self._deadlines = Deadlines(config.queue_timeout_s)
        self._throughput = Throughput()
        self._num_tokens = 0  # that this turn's launch works on
        self._in_flight: list[Any] = []  # handles launched and not fetched: none or one between turns
        self._fetched: list[tuple[StepResult, ...]] = []  # in this turn, and not applied yet
        self._grammars = Grammars(tokenizer.vocab_size if vocab_size is None else vocab_size)
        self._published = (0, 0)  # who waits, and free slots, as they were told last
        self._events: list[Event] = []  # of this turn
        self._ended_ids: list[str] = []  # of this turn
        self._num_aborted_by_drain = 0
        self._num_faults = 0
        self._num_steps = {"prefill": 0, "decode": 0}
        self._busy_s = 0.0  # in turns that have ended
        self._began_s = 0.0  # of this turn
        self._device_wait_s = 0.0
        self._launched_s: list[float] = []  # when those in flight were launched
        self._fetched_s = 0.0  # when the last of those before was there
        self._host_times = StepTimes()
        self._device_times = StepTimes()

    # From any thread.

    def submit(self, request: Request) -> None:
        """Queue a request; its events come through `deliver`.

        Raises ContextLengthError or RequestError when it can't be served as it is, QueueFullError when
        too many wait, UnavailableError when the engine is starting, draining or dead.
        """
        check_request(request, self._config, self._vocab_size, self._eos_ids)
        self._intake.submit(request)

    def abort(self, request_id: str) -> None:
        """End a request at the next turn, queued or running. An id that is unknown or ended is ignored."""
        self._intake.abort(request_id)

    def stats(self) -> EngineStats:
        return self._intake.stats()._replace(
            num_slow_steps=self._watchdog.num_slow,
            host_times=self._host_times.snapshot(),
            device_times=self._device_times.snapshot(),
        )

    def start(self, *, in_thread: bool = True) -> None:
        """Begin to take requests. Without a thread of its own, the caller calls `turn` again and again."""
        self._intake.open()
        if in_thread:
            self._thread = threading.Thread(target=self._run, name="jaxserve-engine", daemon=True)
            self._thread.start()
            self._watchdog.start()

    def drain(self, timeout_s: float) -> bool:
        """Refuse new requests, wait for those at hand, and abort the ones left after `timeout_s`.

        Returns whether all of them ended by themselves. Takes at most GRACE_S longer than `timeout_s`,
        and longer than the step at hand only if the device hangs. A second call can but shorten the first.
        """
        self._intake.drain(timeout_s)
        if self._thread is None:
            while self.turn():
                pass
        return self._intake.wait_settled(timeout_s + GRACE_S) and not self._num_aborted_by_drain

    def stop(self, timeout_s: float = 0.0) -> bool:
        """Drain, then end the engine thread. Returns whether all requests ended by themselves.

        A device that hangs keeps neither clients nor the process: GRACE_S after the deadline the requests
        are ended with an error, and the thread, a daemon, is left behind.
        """
        ended_well = self.drain(timeout_s)
        self._intake.stop()
        self._watchdog.stop()
        if self._thread is not None:
            self._thread.join(GRACE_S if self._intake.wait_settled(0) else 0)
            ended_well = ended_well and not self._thread.is_alive()
        now = time.monotonic()
        message = f"the engine was stopped, and the device did not answer for {GRACE_S:g} s"
        left = [last_event(r, None, "error", now, error=message) for r in self._intake.close("stopped")]
        if left:
            self._deliver(left)
            self._intake.settle()
        self._on_stop()
        return ended_well

    # From the engine thread, or from the one caller that drives an engine without a thread.

    def turn(self) -> bool:
        """One round of the loop. Returns whether there was anything to do."""
        if self._intake.is_dead or not (self._has_work() or self._intake.has_commands):
            return False
        self._began_s = self._turn_began_s = time.monotonic()
        waited_s = self._device_wait_s
        try:
            self._advance(self._began_s)
        except Exception as error:
            logger.exception("the engine can't go on")
            self._die(error)
        self._turn_began_s = None
        took_s = time.monotonic() - self._began_s
        self._busy_s += took_s
        self._host_times.add(took_s - (self._device_wait_s - waited_s))
        self._throughput.add(self._num_tokens, took_s)
        return True

    def _run(self) -> None:
        try:
            while self._intake.wait(self._has_work):
                self.turn()
        except BaseException as error:  # whatever it is, no client may be left waiting
            self._die(error)
            raise

    def _has_work(self) -> bool:
        return bool(self._live or self._in_flight)

    def _advance(self, now: float) -> None:
        has_commands = self._obey(now)
        self._expire(now)
        self._scheduler.admit(now)
        plan = self._scheduler.schedule()
        self._num_tokens = 0
        if plan is not None:
            self._launched_s.append(time.monotonic())
            if self._grammars.num_live:
                handle = self._runner.launch(plan, self._masks)
            else:
                handle = self._runner.launch(plan)
            self._in_flight.append(handle)
            self._scheduler.commit(plan)
            for step in plan.steps:
                self._num_steps[step.kind] += 1
                self._num_tokens += sum(row.query_len for row in step.rows)
        # Fetch the launch before this one; this one only when there is nothing to launch behind it.
        fetches = len(self._in_flight) > (plan is not None)
        places = self._scheduler.num_waiting, self._scheduler.num_free_slots
        if has_commands or places != self._published or not (fetches or self._fetched):
            self._publish()  # before the wait: who comes in it is to find the places that are free
        if fetches:
            self._fetch()
        if self._fetched:
            now = time.monotonic()
            if self._intake.is_dead:
                return  # stop() gave this thread up and has told everybody
            fetched, self._fetched = self._fetched, []
            for results in fetched:
                self._answer(self._scheduler.apply(results, now), now)
            if not self._has_work():
                self._look_for_faults()
            self._publish()
        else:
            assert plan is not None or not self._live, "live requests, but nothing to launch or to read"
        if self._events:
            events, self._events = self._events, []
            self._deliver(events)
            self._intake.settle()

    def _fetch(self) -> None:
        """Wait for the ids of the oldest launch."""
        before_s = time.monotonic()
        self._fetched.append(self._runner.fetch(self._in_flight.pop(0)))
        now = time.monotonic()
        self._device_wait_s += now - before_s
        # Steps run one after the other. Ids that were there before this thread looked make it seem longer.
        self._device_times.add(now - max(self._launched_s.pop(0), self._fetched_s))
        self._fetched_s = now

    def _masks(self, step: Step) -> np.ndarray | None:
        """Which ids the step's rows may yield; None when no row has a grammar.

        The runner calls this when the step's forward pass is launched and its sampler isn't. So the ids that
        came before are read, and the masks made, while the device works on that pass.
        """
        rows = {
            n: seq
            for n, row in enumerate(step.rows)
            if row.sample and (seq := self._scheduler.owner(row.slot)).request.grammar is not None
        }
        if not rows:
            return None
        while self._in_flight:
            self._fetch()
        return self._grammars.masks(step.batch, rows, self._scheduler.peek(self._fetched))

    def _obey(self, now: float) -> bool:
        """Do what came in since the last turn. Returns whether anything did."""
        commands, expired = self._intake.take(now)
        for command in commands:
            if isinstance(command, Request):
                self._begin(command, now)
            elif (seq := self._live.get(command.request_id)) is not None:
                self._abort(seq, now)
        if expired:
            self._num_aborted_by_drain += len(self._live)
            for seq in list(self._live.values()):
                self._abort(seq, now)
        return bool(commands)

    def _expire(self, now: float) -> None:
        """End the requests whose time is up, wherever they are."""
        if not self._live:
            self._deadlines.clear()
        for request_id, arrival_s, is_queue in self._deadlines.passed(now):
            seq = self._live.get(request_id)
            if seq is None or seq.request.arrival_s != arrival_s:
                continue
            waited = f"{now - arrival_s:.3g} s"
            if not is_queue:
                state = f"after {len(seq.output_ids)} tokens" if seq.admitted_s else "still in the queue"
                error = f"the request's timeout of {seq.request.timeout_s:g} s has passed, {state}"
            elif seq.admitted_s is None:
                limit_s = self._config.queue_timeout_s
                error = f"the request has waited {waited} for its turn, the server's limit is {limit_s:g} s"
            else:
                continue
            self._end(seq, "timeout", now, error=error)

    def _begin(self, request: Request, now: float) -> None:
        try:
            output = OutputProcessor(request.params, self._tokenizer, self._eos_ids, self._whole_texts)
            if request.grammar is not None:
                self._grammars.add(request.request_id, request.grammar)
        except Exception as error:
            logger.exception("request %s can't begin", request.request_id)
            self._ended_ids.append(request.request_id)
            self._events.append(last_event(request, None, "error", now, error=_describe(error)))
            return
        self._live[request.request_id] = seq = self._scheduler.add(request)
        seq.output = output
        self._deadlines.add(request)

    def _answer(self, sampled: Iterable[tuple[Sequence, int]], now: float) -> None:
        """Turn sampled ids into events. What goes wrong with one request's text ends that request only."""
        for seq, token_id in sampled:
            if seq.is_simple and not seq.has_diverged:  # most ids, in few instructions
                try:
                    text, finish_reason, stop_reason = seq.output.add(token_id)
                except Exception as error:
                    self._fail(seq, token_id, now, error)
                    continue
                if finish_reason is None:
                    self._events.append(token_event(seq, now, token_id, text))
                else:
                    self._end(
                        seq, finish_reason, now, token_ids=(token_id,), text=text, stop_reason=stop_reason
                    )
            else:
                self._answer_in_full(seq, token_id, now)

    def _answer_in_full(self, seq: Sequence, token_id: int, now: float) -> None:
        """As `_answer`, of one id, for what only few requests ask."""
        if seq.has_diverged:
            logger.error("request %s got other ids after a preemption", seq.request.request_id)
            self._end(seq, "error", now, error=DIVERGED)
            return
        figures = figures_of(seq) if seq.tells_logprobs else {}
        if not seq.request.params.max_tokens:  # the prompt is computed, and the id is no answer
            self._end_prompt(seq, now, figures)
            return
        try:
            text, finish_reason, stop_reason = seq.output.add(token_id)
            if seq.request.grammar is not None:
                self._grammars.check(seq)
                # Nothing but an end could follow?
                if finish_reason != "stop" and self._grammars.is_complete(seq):
                    text, finish_reason = text + seq.output.flush(), "stop"
        except GrammarLimitError as error:
            logger.info("request %s can't go on: %s", seq.request.request_id, error)
            self._end(seq, "grammar", now, token_ids=(token_id,), error=str(error))
        except Exception as error:
            self._fail(seq, token_id, now, error)
        else:
            if finish_reason is None:
                self._events.append(token_event(seq, now, token_id, text, **figures))
                return
            self._end(
                seq, finish_reason, now, token_ids=(token_id,), text=text, stop_reason=stop_reason, **figures
            )

    def _fail(self, seq: Sequence, token_id: int, now: float, error: Exception) -> None:
        """What this id brought can't be told; called where `error` is handled."""
        logger.exception("request %s can't go on", seq.request.request_id)
        self._end(seq, "error", now, token_ids=(token_id,), error=_describe(error))

    def _end_prompt(self, seq: Sequence, now: float, figures: Mapping[str, Any]) -> None:
        """The end of a request of which only the prompt was to be computed."""
        if seq.pooled is not None:
            figures = {**figures, "embedding": unit_vector(seq.pooled)}
            if figures["embedding"] is None:
                self._end(seq, "error", now, error=NO_DIRECTION)
                return
        self._end(seq, "length", now, **figures)

    def _abort(self, seq: Sequence, now: float) -> None:
        try:
            text = seq.output.flush()
        except Exception as error:
            logger.exception("request %s can't be aborted in order", seq.request.request_id)
            self._end(seq, "error", now, error=_describe(error))
        else:
            self._end(seq, "abort", now, text=text)

    def _end(self, seq: Sequence, reason: FinishReason, now: float, **details: Any) -> None:
        self._scheduler.finish(seq)
        if reason in ("stop", "length") and seq.request.params.max_tokens:
            self._scheduler.observe_output(len(seq.output_ids))
        request = seq.request
        del self._live[request.request_id]
        self._grammars.drop(request.request_id)
        self._ended_ids.append(request.request_id)
        self._events.append(last_event(request, seq, reason, now, **details))

    def _publish(self) -> None:
        """Show this turn's figures before its events: who has seen the last event sees a free slot."""
        num_waiting = self._scheduler.num_waiting
        self._published = num_waiting, self._scheduler.num_free_slots
        stats = EngineStats(
            num_running=len(self._live) - num_waiting,
            num_waiting=num_waiting,
            wait_reason=self._scheduler.wait_reason,
            num_queued_tokens=self._scheduler.num_queued_tokens,
            mean_output=self._scheduler.mean_output,
            tokens_per_s=self._throughput.tokens_per_s,
            num_preemptions=self._scheduler.num_preemptions,
            num_pages_total=self._scheduler.num_pages_total,
            num_pages_used=self._scheduler.num_pages_used,
            num_pages_cached=self._scheduler.num_pages_cached,
            num_queried_tokens=self._scheduler.num_queried_tokens,
            num_hit_tokens=self._scheduler.num_hit_tokens,
            num_steps=self._num_steps.copy(),
            num_faults=self._num_faults,
            host_time_s=self._busy_s + time.monotonic() - self._began_s - self._device_wait_s,
            device_wait_s=self._device_wait_s,
        )
        # Whoever waits is in front of those who arrive, and gets the next free slot.
        num_vacant = 0 if num_waiting else self._scheduler.num_free_slots
        self._intake.publish(stats, num_vacant, self._ended_ids)
        self._ended_ids.clear()

    def _look_for_faults(self) -> None:
        """Nobody is left: say so if anything is still held. That costs capacity, not answers, so go on."""
        if (fault := self._scheduler.idle_fault()) is not None:
            self._num_faults += 1
            logger.error("the engine is idle, but %s; please report it, and restart when it suits", fault)

    def _die(self, cause: BaseException) -> None:
        """End every request with an error, and the engine."""
        reason = _describe(cause)
        now = time.monotonic()
        events, self._events = self._events, []
        for request in self._intake.close(reason, self._ended_ids):
            seq = self._live.get(request.request_id)
            events.append(last_event(request, seq, "error", now, error=f"the engine failed: {reason}"))
        self._live.clear()
        self._grammars.clear()
        self._in_flight.clear()
        try:
            if events:
                self._deliver(events)
        except Exception:
            logger.exception("the last events can't be delivered")
        self._intake.settle()


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
