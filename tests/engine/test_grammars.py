"""Answers that follow a grammar, over a fake device that picks at random from what it is allowed."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine import grammars
from jaxserve.engine.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.errors import GrammarError, GrammarLimitError
from jaxserve.grammar import spec as specs
from jaxserve.grammar.compiler import GrammarCompiler
from jaxserve.types import Event, Grammar, Request, SamplingParams
from tests.fakes import EOS, FakeModel, FakeRunner, FakeTokenizer

TOKENIZER = FakeTokenizer()
V = TOKENIZER.vocab_size
COMPILER = GrammarCompiler(TOKENIZER, V)
CONFIG = EngineConfig(max_model_len=64, num_pages=65, page_size=4, max_num_seqs=4)
PATTERNS = (r"[ab]{3,9}", r"\{\"(x|yes)\": [0-9]{1,4}\}", r"é{2}🙂?", r"z")


@dataclass(frozen=True)
class Answer:
    ids: list[int]
    text: str
    last: Event


def request(
    n: int, grammar: Grammar | None, *, max_tokens: int = 24, prompt: Sequence[int] = (3, 4, 5), **params
) -> Request:
    return Request(
        str(n), tuple(prompt), SamplingParams(max_tokens, seed=n, **params), arrival_s=0.0, grammar=grammar
    )


def grammar_of(pattern: str | None) -> Grammar | None:
    return None if pattern is None else COMPILER.compile(specs.regex(pattern, "x"))


def serve(
    requests: Sequence[Request],
    config: EngineConfig = CONFIG,
    *,
    arrivals: Sequence[int] = (),
    eos_every: int | None = 3,
    watch: bool = True,
    hopeful: bool = False,  # admission expects short answers, and will have to preempt
) -> tuple[list[Answer], Engine]:
    events: list[Event] = []
    runner = FakeRunner(config, FakeModel(ids=tuple(3 + b for b in b"abz{1"), eos_every=eos_every))
    engine = Engine(config, runner, TOKENIZER, deliver=events.extend)
    if watch:
        runner.watch(engine._scheduler)
    if hopeful:
        engine._scheduler._admission.mean_output = 1.0
    engine.start(in_thread=False)
    arrivals = arrivals or [0] * len(requests)
    for turn in range(10_000):
        for one, at in zip(requests, arrivals):
            if at == turn:
                engine.submit(one)
        if not engine.turn() and turn >= max(arrivals):
            break
        engine._scheduler.check()
    answers = []
    for one in requests:
        own = [event for event in events if event.request_id == one.request_id]
        ids = [token_id for event in own for token_id in event.token_ids]
        answers.append(Answer(ids, "".join(event.text for event in own), own[-1]))
    assert not engine._grammars.num_live, "a grammar outlives its request"
    return answers, engine


@given(
    st.lists(st.sampled_from([*PATTERNS, None]), min_size=1, max_size=6),
    st.lists(st.integers(0, 12), min_size=6, max_size=6),
    st.sampled_from([0.0, 1.0]),
    st.booleans(),
    st.sampled_from([1, 1, 3, 4]),
    st.integers(0, 2**20),
)
@settings(max_examples=20)
def test_answers_match_their_grammar_and_neighbours_are_what_they_are_alone(
    patterns: list[str | None],
    arrivals: list[int],
    temperature: float,
    tight: bool,
    decode_steps: int,
    seed: int,
):
    config = replace(CONFIG, num_pages=17 + 4, decode_buckets=(), prefill_buckets=()) if tight else CONFIG
    config = replace(config, decode_steps=decode_steps)
    requests = [
        request(
            n, grammar_of(pattern), temperature=temperature, prompt=[3 + (seed + n) % 99] * (1 + seed % 7)
        )
        for n, pattern in enumerate(patterns)
    ]
    answers, _ = serve(requests, config, arrivals=arrivals[: len(requests)])
    for one, pattern, answer in zip(requests, patterns, answers):
        if pattern is not None and answer.last.finish_reason == "stop":
            assert re.fullmatch(pattern, answer.text), (pattern, answer.text)
        assert answer.last.finish_reason in ("stop", "length")
        assert answer.ids == serve([one])[0][0].ids


def test_with_several_steps_a_launch_the_free_take_them_while_nobody_has_a_grammar():
    config = replace(CONFIG, decode_steps=4)
    free, held = request(0, None, max_tokens=40), request(1, grammar_of("[ab]{6}"))
    answers, engine = serve([free, held], config, arrivals=[0, 6], eos_every=None)
    assert re.fullmatch("[ab]{6}", answers[1].text)
    assert answers[0].ids == serve([free], CONFIG, eos_every=None)[0][0].ids
    steps = [step for plan in engine._runner.plans for step in plan.steps if step.kind == "decode"]
    assert {step.iterations for step in steps if len(step.rows) == 2} == {1}, "a mask is of one id"
    alone = [step.iterations for step in steps if len(step.rows) == 1]
    assert alone.count(4) >= 4
    assert alone[-1] == 4 or 4 in alone[-3:], "and again when the grammar has gone"


def test_preempted_answers_go_on_where_they_were_in_their_grammar():
    config = replace(CONFIG, num_pages=18, max_num_seqs=3, decode_buckets=(), prefill_buckets=())
    pattern = r"([ab]c){30}"
    requests = [request(n, grammar_of(pattern), max_tokens=56, prompt=[9 + n]) for n in range(3)]
    answers, engine = serve(requests, config, hopeful=True)
    assert engine.stats().num_preemptions > 0
    for one, answer in zip(requests, answers):
        assert re.fullmatch(r"([ab]c)*[ab]?", answer.text)
        assert answer.ids == serve([one])[0][0].ids


def test_answers_sampled_again_start_over_in_their_grammar():
    """A deterministic engine repeats an answer after a preemption, id by id."""
    config = replace(
        CONFIG, num_pages=18, max_num_seqs=3, deterministic=True, decode_buckets=(), prefill_buckets=()
    )
    requests = [request(n, grammar_of(r"([ab]c){30}"), max_tokens=56, prompt=[9 + n]) for n in range(3)]
    answers, engine = serve(requests, config, watch=False, hopeful=True)
    assert engine.stats().num_preemptions > 0
    for one, answer in zip(requests, answers):
        assert answer.ids == serve([one])[0][0].ids


def test_an_answer_ends_with_its_grammar_at_once_and_says_stop():
    [answer], _ = serve([request(0, grammar_of("ab{2}z"), max_tokens=4)])
    assert answer.text == "abbz"
    assert answer.last.finish_reason == "stop"
    assert EOS not in answer.ids


def test_an_answer_that_is_cut_says_length():
    [answer], _ = serve([request(0, grammar_of("a{9}"), max_tokens=4)])
    assert answer.text == "aaaa"
    assert answer.last.finish_reason == "length"


@pytest.mark.parametrize(
    "params", [{"ignore_eos": True}, {"stop": ("zz",)}, {"stop_token_ids": frozenset({7})}]
)
def test_other_ends_go_together_with_a_grammar(params: dict):
    [answer], _ = serve([request(0, grammar_of("[az]{2,30}"), **params)], eos_every=2)
    whole = "stop" not in params
    assert answer.last.finish_reason in ("stop", "length")
    assert re.fullmatch("[az]{2,30}" if whole else "[az]*", answer.text)


def test_the_ids_before_are_read_behind_the_forward_pass_only_where_a_row_has_a_grammar():
    """Seen by what is in flight when a step is launched, and when its sampler asks for masks."""
    seen: list[tuple[bool, int, int | None]] = []

    class Watching(FakeRunner):
        def launch(self, plan, masks=None):
            before = self.num_in_flight
            after: list[int] = []

            def source(step):
                found = masks(step)
                after.append(self.num_in_flight)
                return found

            handle = super().launch(plan, None if masks is None else source)
            seen.append((masks is not None, before, after[0] if after else None))
            return handle

    events: list[Event] = []
    runner = Watching(CONFIG, FakeModel(ids=tuple(3 + b for b in b"ab")))
    engine = Engine(CONFIG, runner, TOKENIZER, deliver=events.extend)
    engine.start(in_thread=False)
    engine.submit(request(0, None, max_tokens=12))
    engine.submit(request(1, grammar_of("[ab]{4}"), max_tokens=12))
    while engine.turn():
        pass
    constrained = [one for one in seen if one[0]]
    assert constrained
    assert all(after == 0 for _, before, after in constrained), "a mask was made before the ids were known"
    assert [before for _, before, _ in seen] == [0] + [1] * (len(seen) - 1), "a launch waited for ids"
    free = [one for one in seen if not one[0]]
    assert len(free) >= 5, "without a grammar left, nobody asks for masks"


class _Breaking:
    """A grammar whose state fails at the third id, as one does that takes more work than a step may."""

    def __init__(self) -> None:
        self.taken = 0

    def start(self) -> _Breaking:
        return _Breaking()

    def advance(self, token_id: int) -> None:
        self.taken += 1
        if self.taken == 3:
            raise GrammarError("too much work")

    def fill(self, words: np.ndarray) -> None:
        words[:] = -1

    is_complete = False


def test_a_grammar_that_fails_ends_its_own_request_alone():
    answers, engine = serve([request(0, _Breaking()), request(1, grammar_of("a{8}"))], eos_every=None)
    assert answers[0].last.finish_reason == "error"
    assert "too much work" in (answers[0].last.error or "")
    assert answers[1].text == "a" * 8
    assert engine.stats().state == "ready"


class _Costly:
    """Any text; the mask for the id `fails_at` is too costly, and each takes `cpu_s` of a thread's time."""

    is_complete = False

    def __init__(self, fails_at: int | None = None, cpu_s: float = 0.0):
        self.fails_at, self.cpu_s, self.taken = fails_at, cpu_s, 0

    def start(self) -> _Costly:
        return _Costly(self.fails_at, self.cpu_s)

    def advance(self, token_id: int) -> None:
        self.taken += 1

    def fill(self, words: np.ndarray) -> None:
        end_s = time.thread_time() + self.cpu_s
        while time.thread_time() < end_s:
            pass
        if self.taken == self.fails_at:
            raise GrammarLimitError("too many items")
        words[:] = -1


@pytest.mark.parametrize("eos_every", [None, 1])
def test_a_mask_that_is_too_costly_ends_its_own_request_behind_the_ids_that_are_good(eos_every: int | None):
    """Also where the next id would be an end: it was picked without a mask."""

    class Held(_Costly):
        def start(self) -> Held:
            return Held(self.fails_at)

        def fill(self, words: np.ndarray) -> None:
            super().fill(words)
            words[:] = 0
            words[0] = 1 << 5

    requests = [request(0, Held(3)), request(1, grammar_of("a{8}")), request(2, None)]
    answers, engine = serve(requests, eos_every=eos_every)
    assert answers[0].last.finish_reason == "grammar"
    assert answers[0].last.error == "too many items"
    assert answers[0].ids[:-1] == [5, 5, 5], "and one that is not good"
    assert answers[0].text == "\x02" * 3
    assert answers[1].text == "a" * 8
    assert answers[2].ids == serve([requests[2]], eos_every=eos_every)[0][0].ids
    assert engine.stats().state == "ready"


def test_an_answer_whose_masks_take_too_much_time_in_all_ends_by_itself(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(grammars, "EXCESS_CPU_S", 0.05)
    dear = grammars.TOKEN_CPU_S + 0.02
    requests = [request(0, _Costly(cpu_s=dear)), request(1, _Costly()), request(2, grammar_of("[ab]{20}"))]
    answers, _ = serve(requests, eos_every=None)
    assert answers[0].last.finish_reason == "grammar"
    assert "processor time" in (answers[0].last.error or "")
    assert 1 <= len(answers[0].ids) <= 3, "two that fit at most, and one that did not"
    assert answers[1].last.finish_reason == "length"
    assert len(answers[2].text) == 20


def test_an_aborted_request_leaves_no_grammar_behind():
    events: list[Event] = []
    engine = Engine(CONFIG, FakeRunner(CONFIG, FakeModel()), TOKENIZER, deliver=events.extend)
    engine.start(in_thread=False)
    for n in range(6):  # more than there are slots
        engine.submit(request(n, grammar_of("[bc]{50}"), max_tokens=50))
    for _ in range(5):
        engine.turn()
    assert engine._grammars.num_live == 6
    for n in range(6):
        engine.abort(str(n))
    while engine.turn():
        pass
    assert engine._grammars.num_live == 0
