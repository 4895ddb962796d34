"""Embeddings by the compiled programs, against the hidden states of a plain NumPy decoder."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxserve.engine.engine import Engine
from jaxserve.engine.plan import Row, Step
from jaxserve.runtime.compilations import CompilationCounter
from jaxserve.runtime.pooling import most_rows, pack_pooled
from jaxserve.types import Event, Request, SamplingParams
from tests.fakes import FakeTokenizer
from tests.models import numpy_decoder
from tests.models.tiny import VOCAB
from tests.runtime.conftest import CHUNKED, Tiny

ALONE = SamplingParams(0, temperature=0.0)


def expected(tiny: Tiny, prompt: tuple[int, ...], pooling: str) -> np.ndarray:
    hidden = numpy_decoder.hidden(tiny.hf_config, tiny.hf_tensors, prompt)
    vector = hidden[-1] if pooling == "last" else hidden.mean(axis=0)
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_vector_is_that_of_the_text_alone_in_any_company_and_compiles_nothing(chunked, pooling):
    tiny, runner = chunked
    rng = np.random.default_rng(5)
    stem = rng.integers(VOCAB, size=20).tolist()
    prompts = [
        (*stem[: int(rng.choice([0, 8, 20]))], *rng.integers(VOCAB, size=int(rng.integers(1, 20))).tolist())
        for _ in range(10)
    ]
    events: list[Event] = []
    config = replace(CHUNKED, pooling=pooling)
    engine = Engine(config, runner, FakeTokenizer(), deliver=events.extend, eos_ids=frozenset())
    engine.start(in_thread=False)
    for n, prompt in enumerate(prompts):
        embeds = n % 3 != 2
        params = ALONE if embeds else SamplingParams(4, seed=n, prompt_logprobs=1)
        engine.submit(Request(str(n), prompt, params, arrival_s=0.0, embeds=embeds))
    counter = CompilationCounter()
    turn = 0
    try:
        with jax.no_tracing():
            while engine.turn():
                turn += 1
                running = list(engine._scheduler._running())
                if turn % 3 == 0 and len(running) > 1:
                    engine._scheduler.preempt(running[-1])
        assert counter.count == 0
    finally:
        counter.close()
    assert engine.stats().num_preemptions > 0
    vectors = {int(event.request_id): event.embedding for event in events if event.embedding is not None}
    assert len(vectors) == 7
    for n, vector in vectors.items():
        assert vector.shape == (tiny.model.hidden_size,)
        np.testing.assert_allclose(np.linalg.norm(vector), 1, rtol=1e-6)
        np.testing.assert_allclose(vector, expected(tiny, prompts[n], pooling), atol=2e-5)


def test_only_steps_that_pool_launch_the_programs_for_it(chunked):
    _, runner = chunked
    programs, launched = runner._steps, []

    class Watched(dict):
        def __getitem__(self, key):
            launched.append(key[0])
            return programs[key]

    engine = Engine(CHUNKED, runner, FakeTokenizer(), deliver=lambda events: None, eos_ids=frozenset())
    engine.start(in_thread=False)
    runner._steps = Watched()
    try:
        engine.submit(Request("a", (1,) * 25, ALONE, arrival_s=0.0, embeds=True))
        while engine.turn():
            pass
    finally:
        runner._steps = programs
    assert launched == ["prefill", "greedy"] * 2 + ["prefill", "greedy", "gather", "pool"]


def test_each_row_sums_its_own_queries_and_padding_none():
    def row(slot: int, query_len: int, num_pooled: int) -> Row:
        return Row(slot, 0, query_len, (1,) * query_len, 0, (), True, None, num_pooled=num_pooled)

    step = Step("prefill", 3, 10, (row(0, 4, 4), row(1, 10, 0), row(2, 7, 2)))
    wanted = pack_pooled(step, CHUNKED, VOCAB)
    assert wanted is not None
    assert wanted[:, :7].tolist() == [[0, 1, 2, 3, 25, 26, -1], [0, 0, 0, 0, 2, 2, most_rows(CHUNKED)]]
    assert (np.diff(wanted[1]) >= 0).all()
    assert pack_pooled(replace(step, rows=step.rows[1:2]), CHUNKED, VOCAB) is None
