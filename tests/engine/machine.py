"""A random life of an engine: whatever happens, in whatever order, against each request alone."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from jaxserve.engine.config import EngineConfig, pages_within
from jaxserve.engine.sequence import SequenceState
from jaxserve.errors import QueueFullError
from jaxserve.types import Request, SamplingParams
from tests.engine.oracle import answer
from tests.engine.test_serving import TOKENIZER, Served
from tests.fakes import FakeModel

MODEL = FakeModel(ids=tuple(3 + byte for byte in "abé".encode()), eos_every=25)
# Prompts are made of these: they share beginnings, in all lengths, and never whole texts.
STEMS = (tuple(range(10, 60)), tuple(range(10, 30)) + tuple(range(90, 120)), (7,) * 50)


WINDOWS = (None, None, None, 1, 3, 6, 12, 30)
MODES = ({}, {}, {"deterministic": True}, {"decode_steps": 2}, {"decode_steps": 3}, {"decode_steps": 7})


class EngineMachine(RuleBasedStateMachine):
    """Rules are what clients, time and bad luck do; every turn checks every invariant."""

    @initialize(data=st.data())
    def begin(self, data: st.DataObject) -> None:
        draw = data.draw
        page_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
        max_model_len = draw(st.integers(20, 60))
        window = draw(st.sampled_from(WINDOWS))
        prefill_tokens = draw(st.sampled_from([3, 8, 16, 64]))
        mode = draw(st.sampled_from(MODES))
        most_pages = -(-max_model_len // page_size)
        if window is not None:
            decode_steps = mode.get("decode_steps", 1)
            most_pages = min(most_pages, pages_within(window, page_size, prefill_tokens, decode_steps))
        self.config = EngineConfig(
            max_model_len=max_model_len,
            page_size=page_size,
            num_pages=1 + most_pages + draw(st.integers(0, most_pages)),
            window=window,
            max_num_seqs=draw(st.integers(2, 6)),
            max_num_queued=20,
            max_queued_tokens=400,
            max_prefill_tokens=prefill_tokens,
            min_prefill_queries=draw(st.sampled_from([1, 4, 8])),
            scheduling_policy=draw(st.sampled_from(["fcfs", "priority"])),
            admission=draw(st.sampled_from(["optimistic", "optimistic", "optimistic", "reserve"])),
            enable_prefix_caching=draw(st.sampled_from([True, True, True, True, False])),
            prefix_alignment=draw(st.sampled_from([None, None, None, 2 * page_size])),
            **mode,
        )
        self.model = replace(MODEL, window=window)
        self.served = Served(self.config, self.model, expected_output=draw(st.sampled_from([0.0, 10.0])))
        self.requests: list[Request] = []
        self.aborted: set[str] = set()

    @rule(
        stem=st.sampled_from(STEMS),
        shared=st.integers(0, 50),
        own=st.lists(st.integers(5, 8), min_size=1, max_size=4),
        max_tokens=st.integers(1, 40),
        seed=st.integers(0, 2),
        stop=st.sampled_from([(), (), ("ab",), ("é", "bba")]),
        priority=st.integers(-2, 2),
        salt=st.sampled_from([None, None, None, "tenant"]),
        copies=st.sampled_from([1, 1, 1, 2, 3]),
        is_group=st.booleans(),
    )
    def submit(self, stem, shared, own, max_tokens, seed, stop, priority, salt, copies, is_group) -> None:
        prompt = (*stem[:shared], *own)[: self.config.max_model_len - 1]
        params = SamplingParams(
            min(max_tokens, self.config.max_model_len - len(prompt)), temperature=0.5, seed=seed, stop=stop,
            repetition_penalty=1.5 if seed % 8 == 7 else 1.0,  # FakeRunner checks the history it is told
        )  # fmt: skip
        if self.config.scheduling_policy == "fcfs":
            priority = 0
        group = f"group of {len(self.requests)}" if copies > 1 and is_group else None
        for _ in range(copies):
            name = str(len(self.requests))
            request = Request(name, prompt, params, 0.0, priority=priority, cache_salt=salt, group=group)
            try:
                self.served.engine.submit(request)
            except QueueFullError:
                return
            self.requests.append(request)

    @rule(count=st.integers(1, 12))
    def turn(self, count: int) -> None:
        for _ in range(count):
            self.served.turn()

    @precondition(lambda self: self.requests)
    @rule(which=st.integers(0, 5))
    def abort(self, which: int) -> None:
        """One of the latest: waiting, in prefill, decoding, preempted, or ended."""
        name = self.requests[max(0, len(self.requests) - 1 - which)].request_id
        self.aborted.add(name)
        self.served.engine.abort(name)

    @precondition(lambda self: self.config.admission == "optimistic")
    @rule(which=st.integers(0, 5), also_abort=st.sampled_from([False, False, True]))
    def preempt(self, which: int, also_abort: bool) -> None:
        """Bad luck for one that runs, the first in line or not."""
        running = list(self.served.scheduler._running())
        if running:
            seq = running[which % len(running)]
            self.served.scheduler.preempt(seq)
            assert seq.state is SequenceState.PREEMPTED
            if also_abort:
                self.aborted.add(seq.request.request_id)
                self.served.engine.abort(seq.request.request_id)

    @precondition(lambda self: self.config.admission == "optimistic")
    @rule()
    def expect_short_answers(self) -> None:
        self.served.scheduler._admission.mean_output = 0.0

    def teardown(self) -> None:
        if not hasattr(self, "served"):
            return
        self.served.run()
        for request in self.requests:
            events = self.served.events[request.request_id]
            ids = tuple(token_id for event in events for token_id in event.token_ids)
            last = events[-1]
            whole = answer(self.model.alone(request.prompt_ids, request.params), request.params, TOKENIZER)
            if last.finish_reason == "abort":
                assert request.request_id in self.aborted
                assert ids == whole.token_ids[: len(ids)]
            else:
                text = "".join(event.text for event in events)
                assert (ids, text, last.finish_reason, last.stop_reason) == whole
            assert last.num_cached_tokens < len(request.prompt_ids)
            assert last.num_output_tokens == len(ids)
