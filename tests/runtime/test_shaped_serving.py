"""Requests that shape their logits, through engine and runner: every token follows from its true history."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.plan import Plan, Row, Step
from jaxserve.ops.backend import XLA
from jaxserve.runtime.compilations import CompilationCounter
from jaxserve.runtime.runner import ModelRunner
from jaxserve.runtime.shaping import allowed_words
from jaxserve.runtime.step import Rows
from jaxserve.types import Event, Request, SamplingParams
from tests.fakes import FakeTokenizer
from tests.models.tiny import VOCAB
from tests.runtime.conftest import Tiny
from tests.runtime.shaping_oracle import probabilities, shaped

EOS = frozenset({4, 9})
CONFIG = EngineConfig(
    max_model_len=64, num_pages=33, page_size=8, max_num_seqs=4, max_prefill_tokens=32,
    decode_buckets=(4,), prefill_buckets=((4, 8),),
)  # fmt: skip


@dataclass(frozen=True)
class Shaped:
    """One launch of the program that shapes logits."""

    owners: dict[int, SamplingParams]  # of the slots, when it was launched
    prompts: dict[int, tuple[int, ...]]
    slots: jax.Array
    positions: jax.Array
    sampled: jax.Array
    flags: np.ndarray
    before: jax.Array
    after: jax.Array


class Watched:
    """A runner that keeps what its shaping programs were given and gave."""

    def __init__(self, runner: ModelRunner):
        self.runner = runner
        self.owners: dict[int, SamplingParams] = {}
        self.prompts: dict[int, tuple[int, ...]] = {}
        self.shaped: list[Shaped] = []
        self.programs = dict(runner._steps)
        for key, program in self.programs.items():
            if key[0] == "shape":
                runner._steps[key] = self._recording(program)

    def _recording(self, program: Any) -> Any:
        def shape(state: Any, logits: Any, rows: Any, flags: Any, mask: Any) -> Any:
            after = program(state, logits, rows, flags, mask)
            on_host = Rows(np.asarray(rows.packed))  # type: ignore[arg-type] # slices of it compile nothing
            at = on_host.slots, on_host.positions, on_host.sampled
            self.shaped.append(Shaped(dict(self.owners), dict(self.prompts), *at, flags, logits, after))
            return after

        return shape

    def launch(self, plan: Plan, masks: Any = None) -> Any:
        for step in plan.steps:
            for row in step.rows:
                if row.params is not None:
                    self.owners[row.slot] = row.params
                    if row.history is not None:
                        self.prompts[row.slot] = row.history.prompt_ids
        return self.runner.launch(plan, masks)

    def fetch(self, handle: Any) -> Any:
        return self.runner.fetch(handle)

    def close(self) -> None:
        self.runner._steps.update(self.programs)


@pytest.fixture(scope="module")
def runner(llama: Tiny) -> ModelRunner:
    return llama.runner(CONFIG, XLA)


def run(runner: Any, requests: list[Request], *, preempt_every: int = 0) -> tuple[dict[str, list[int]], int]:
    """(ids by request, preemptions). With `preempt_every`, every so many turns somebody loses its slot."""
    events: list[Event] = []
    engine = Engine(CONFIG, runner, FakeTokenizer(), deliver=events.extend, eos_ids=EOS, vocab_size=VOCAB)
    engine.start(in_thread=False)
    for request in requests:
        engine.submit(request)
    turn = 0
    while engine.turn():
        turn += 1
        decoding = list(engine._scheduler._decoding.values())
        if preempt_every and turn % preempt_every == 0 and decoding:
            engine._scheduler.preempt(decoding[turn % len(decoding)])
    assert not [event.error for event in events if event.error]
    ids: dict[str, list[int]] = {request.request_id: [] for request in requests}
    for event in events:
        ids[event.request_id].extend(event.token_ids)
    return ids, engine.stats().num_preemptions


def requests() -> list[Request]:
    rng = np.random.default_rng(4)
    wishes: list[dict[str, Any]] = [
        {"repetition_penalty": 1.4},
        {"presence_penalty": 1.2, "frequency_penalty": 0.5},
        {"frequency_penalty": -0.5, "ignore_eos": True},
        {"bad_words": ((40,), *((i, j) for i in range(10) for j in range(10, 30, 2))), "ignore_eos": True},
        {"min_tokens": 15, "stop_token_ids": frozenset((1, 2, 3, 5)), "logit_bias": ((4, 9.0), (2, 9.0))},
        {"allowed_token_ids": frozenset((*range(20, 30), 4, 45))},
        {"logit_bias": tuple((i, float(3 * (i % 5))) for i in range(0, VOCAB, 3))},
        {},
        {
            "repetition_penalty": 0.9, "presence_penalty": 0.5, "frequency_penalty": 0.5, "min_tokens": 18,
            "logit_bias": ((9, 3.0), (11, 4.0)), "bad_words": ((11, 11), (12,)),
            "allowed_token_ids": frozenset(range(3, 47)),
        },
        {},
    ]  # fmt: skip
    made = []
    for i, wish in enumerate([*wishes, *wishes[3:6], wishes[8]]):
        prompt = tuple(rng.integers(5, VOCAB, size=int(rng.integers(3, 24))).tolist())
        temperature = 0.0 if i < len(wishes) else 1.2
        params = SamplingParams(24, temperature=temperature, seed=i, **wish)
        made.append(Request(str(i), prompt, params, 0.0))
    return made


@pytest.fixture(scope="module")
def served(runner: ModelRunner) -> tuple[Watched, list[Request], dict[str, list[int]], int, int]:
    watched, asked = Watched(runner), requests()
    counter = CompilationCounter()
    ids, num_preemptions = run(watched, asked, preempt_every=9)
    num_compiled = counter.count
    counter.close()
    watched.close()
    return watched, asked, ids, num_preemptions, num_compiled


def test_every_token_is_picked_from_logits_shaped_by_its_true_history(served):
    watched, asked, ids, num_preemptions, _ = served
    assert num_preemptions > 3, "nothing was computed again"
    by_prompt = {request.prompt_ids: request for request in asked}
    num_checked = dict.fromkeys(ids, 0)
    for one in watched.shaped:
        before, after = np.asarray(one.before), np.asarray(one.after)
        for row in np.flatnonzero(one.sampled):
            slot, position = int(one.slots[row]), int(one.positions[row])
            if not one.flags[row]:
                np.testing.assert_array_equal(after[row], before[row])
                continue
            params, prompt = one.owners[slot], one.prompts[slot]
            request = by_prompt[prompt]
            output, at = ids[request.request_id], position - len(prompt)
            ends = EOS | params.stop_token_ids
            wanted = shaped(before[row], params, prompt, output[:at], ends)
            np.testing.assert_allclose(probabilities(after[row]), probabilities(wanted), rtol=1e-4, atol=1e-9)
            if params.temperature == 0:
                assert wanted[output[at]] >= wanted.max() - 1e-4
            else:
                assert wanted[output[at]] > -np.inf
            num_checked[request.request_id] += 1
    for request in asked:
        num_tokens = len(ids[request.request_id])
        assert num_checked[request.request_id] >= (num_tokens if request.params.is_shaped else 0)


def test_answers_keep_to_what_was_asked(served):
    _, asked, ids, _, _ = served
    for request in asked:
        params, answer = request.params, ids[request.request_id]
        for word in params.bad_words:
            assert not any(tuple(answer[i : i + len(word)]) == word for i in range(len(answer)))
        if params.allowed_token_ids is not None:
            assert set(answer) <= params.allowed_token_ids
        assert len(answer) >= params.min_tokens
        ends = (frozenset() if params.ignore_eos else EOS) | params.stop_token_ids
        assert not ends & set(answer[: max(params.min_tokens, len(answer) - 1)][: params.min_tokens])
    lengths = {len(ids[r.request_id]) for r in asked if r.params.min_tokens}
    assert min(lengths) < 24, "no end came: min_tokens had nothing to hold back"


def test_shaping_compiles_nothing_after_the_start(served):
    assert served[-1] == 0


def test_neighbours_and_slots_before_do_not_change_an_answer(served, runner):
    _, asked, together, _, _ = served
    for request in asked[1:9:4]:
        alone, _ = run(runner, [request])
        assert alone[request.request_id] == together[request.request_id]


def test_a_batch_without_a_shaped_row_launches_no_program_for_shaping(runner):
    programs = dict(runner._steps)
    for key in programs:
        if key[0] in ("shape", "count", "admit"):
            del runner._steps[key]
    try:
        run(runner, [r for r in requests() if not r.params.is_shaped])
        with pytest.raises(KeyError):
            runner.launch(Plan((Step("prefill", 4, 8, ()),)), masks=lambda step: np.zeros(0))
    finally:
        runner._steps.update(programs)


def test_a_mask_may_be_made_from_the_ids_of_the_launch_before(runner):
    """As a grammar does: launched behind the forward pass, before the sampler, with the ids fetched."""
    params = SamplingParams(8, temperature=0.0)
    first = runner.launch(
        Plan((Step("prefill", 4, 8, (Row(0, 0, 3, (5, 6, 7), 0, (1,), True, params),)),)),
        masks=lambda step: masks_of(step, {11, 12}),
    )
    fetched = []

    def after_the_first(step: Step) -> np.ndarray:
        fetched.append(runner.fetch(first)[0].token_ids[0])
        return masks_of(step, {fetched[0] + 20})

    step = Step("decode", 4, 1, (Row(0, 3, 1, None, 1, (), True, None),))
    second = runner.launch(Plan((step,)), after_the_first)
    assert fetched[0] in (11, 12)
    assert runner.fetch(second)[0].token_ids == (fetched[0] + 20,)


def masks_of(step: Step, ids: set[int]) -> np.ndarray:
    masks = np.full((step.batch, len(allowed_words(None, VOCAB))), -1, np.int32)
    masks[0] = allowed_words(ids, VOCAB).view(np.int32)
    return masks
