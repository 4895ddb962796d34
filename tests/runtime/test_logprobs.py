"""Log-probabilities by the compiled programs, against a log-softmax of a plain NumPy decoder's logits."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
from flax import nnx

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.models.decoder import abstract_decoder
from jaxserve.ops.backend import XLA
from jaxserve.ops.logprobs import BLOCK_BYTES, block_rows, score, score_rows
from jaxserve.runtime.compilations import CompilationCounter
from jaxserve.runtime.logprobs import make_logprobs, make_scorer, num_scored
from jaxserve.runtime.runner import ModelRunner
from jaxserve.types import Event, Request, SamplingParams
from tests.fakes import FakeTokenizer
from tests.models import numpy_decoder
from tests.models.tiny import VOCAB
from tests.runtime.conftest import CHUNKED


def log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


# The reduction alone.


def test_scores_are_those_of_a_log_softmax_and_ties_share_a_rank():
    rng = np.random.default_rng(0)
    logits = np.round(rng.standard_normal((5, 300)) * 3, 1).astype(np.float32)  # many are equal
    targets = np.array([0, 7, 299, int(logits[3].argmax()), int(logits[4].argmin())], np.int32)
    found = jax.tree.map(np.asarray, score(logits, targets, num_top=20))
    wanted = log_softmax(logits.astype(np.float64))
    np.testing.assert_allclose(found.logprob, wanted[np.arange(5), targets], atol=1e-5)
    np.testing.assert_array_equal(found.rank, 1 + (logits > logits[np.arange(5), targets][:, None]).sum(1))
    np.testing.assert_array_equal(found.top_ids, np.argsort(-logits, axis=1, kind="stable")[:, :20])
    np.testing.assert_allclose(found.top_logprobs, np.take_along_axis(wanted, found.top_ids, 1), atol=1e-5)
    assert found.top_logprobs[3, 0] == found.logprob[3]  # to the bit


def test_rows_are_scored_block_by_block_as_they_would_be_at_once(monkeypatch):
    monkeypatch.setattr("jaxserve.ops.logprobs.BLOCK_BYTES", 64 * 4 * 50)
    assert block_rows(256, 50) == 64
    rng = np.random.default_rng(1)
    hidden, weight = (rng.standard_normal(shape).astype(np.float32) for shape in ((256, 8), (8, 50)))
    targets = rng.integers(50, size=256).astype(np.int32)
    seen = []
    head = lambda x: (seen.append(x.shape), x @ weight)[1]
    by_blocks = jax.jit(lambda *args: score_rows(*args, head, vocab_size=50, num_top=3))
    once = score(hidden @ weight, targets, num_top=3)
    for num_wanted in (0, 1, 64, 65, 200, 256):
        for part, wanted in zip(by_blocks(hidden, targets, num_wanted), once):
            np.testing.assert_allclose(part[:num_wanted], wanted[:num_wanted], atol=1e-5)
            assert not np.any(part[-(-num_wanted // 64) * 64 :]), "a block without a wanted row was worked on"
    assert seen == [(64, 8)]  # never the logits of more rows


def test_the_memory_of_scoring_a_prompt_does_not_grow_with_the_prompt(llama):
    """As docs/architecture.md says: three times the logits of one block, whatever the chunk."""
    model = replace(llama.model, vocab_size=(vocab_size := 262_144))
    decoder = abstract_decoder(model, "float32")
    leaves = jax.tree.leaves(nnx.split(decoder)[1])
    for num_tokens in (512, 4096):
        config = EngineConfig(max_model_len=64, num_pages=10, max_prefill_tokens=num_tokens)
        num_rows = num_scored(config, vocab_size)
        assert num_rows == num_tokens
        hidden = jax.ShapeDtypeStruct((num_rows, model.hidden_size), np.float32)
        wanted = jax.ShapeDtypeStruct((2, num_rows), np.int32)
        program = jax.jit(make_scorer(decoder, config, XLA)).lower(leaves, hidden, wanted).compile()
        memory = program.memory_analysis()
        assert memory.temp_size_in_bytes <= 3 * BLOCK_BYTES + 200 * num_tokens
        assert num_tokens * vocab_size * 4 > 3 * BLOCK_BYTES  # as it would be at once


def test_the_memory_of_scoring_sampled_tokens_is_that_of_few_passes_over_the_logits():
    config = EngineConfig(max_model_len=64, num_pages=10)
    logits = jax.ShapeDtypeStruct((8, 262_144), np.float32)
    program = jax.jit(make_logprobs(config)).lower(logits, jax.ShapeDtypeStruct((8,), np.int32)).compile()
    assert program.memory_analysis().temp_size_in_bytes <= 3 * 8 * 262_144 * 4


# Through the engine.


def serve(config: EngineConfig, runner: ModelRunner, jobs: list[tuple[tuple[int, ...], SamplingParams]]):
    """Each job's events, all jobs being in the engine at the same time."""
    events: list[Event] = []
    engine = Engine(config, runner, FakeTokenizer(), deliver=events.extend, eos_ids=frozenset())
    engine.start(in_thread=False)
    for n, (prompt, params) in enumerate(jobs):
        engine.submit(Request(str(n), prompt, params, arrival_s=0.0))
    turn = 0
    while engine.turn():
        turn += 1
        running = list(engine._scheduler._running())
        if turn % 9 == 0 and len(running) > 1:
            engine._scheduler.preempt(running[-1])
    assert not [event.error for event in events if event.error is not None]
    return [[event for event in events if event.request_id == str(n)] for n in range(len(jobs))]


def test_whatever_shares_the_device_each_token_is_scored_as_alone(chunked):
    tiny, runner = chunked
    rng = np.random.default_rng(3)
    stem = rng.integers(VOCAB, size=20).tolist()
    jobs = []
    for n in range(9):
        own = rng.integers(VOCAB, size=int(rng.integers(1, 20))).tolist()
        prompt = (*stem[: int(rng.choice([0, 8, 20]))], *own)
        params = SamplingParams(
            int(rng.integers(0, 8)), temperature=float(n % 2), seed=n, repetition_penalty=1.0 + n % 3,
            logprobs=[None, 0, 2, 6][n % 4], prompt_logprobs=[3, None, 0][n % 3],
        )  # fmt: skip
        jobs.append((prompt, params))
    counter = CompilationCounter()
    try:
        with jax.no_tracing():
            answers = serve(CHUNKED, runner, jobs)
        assert counter.count == 0
    finally:
        counter.close()
    num_compared = 0
    for (prompt, params), events in zip(jobs, answers):
        output = [token_id for event in events for token_id in event.token_ids]
        ids = [*prompt, *output]
        wanted = log_softmax(numpy_decoder.logits(tiny.hf_config, tiny.hf_tensors, ids))
        told = [one for event in events for one in event.logprobs]
        assert len(told) == (0 if params.logprobs is None else len(output))
        scored = list(zip(range(len(prompt), len(ids)), told, [params.logprobs] * len(told)))
        if params.prompt_logprobs is not None:
            first, *rest = events[0].prompt_logprobs
            assert first is None
            assert len(rest) == len(prompt) - 1
            scored += list(zip(range(1, len(prompt)), rest, [params.prompt_logprobs] * len(rest)))
        for at, one, count in scored:
            row = wanted[at - 1]
            assert one.token_id == ids[at]
            assert abs(one.logprob - row[ids[at]]) < 2e-4
            assert (row > row[ids[at]] + 1e-4).sum() < one.rank <= (row > row[ids[at]] - 1e-4).sum()
            assert len(one.top_ids) == len(one.top_logprobs) == count
            np.testing.assert_allclose(one.top_logprobs, -np.sort(-row)[:count], atol=2e-4)
            np.testing.assert_allclose(one.top_logprobs, row[list(one.top_ids)], atol=2e-4)
            num_compared += 1
    assert num_compared > 80


def test_steps_without_a_row_that_asks_launch_no_such_program(chunked):
    _, runner = chunked
    programs, launched = runner._steps, []

    class Watched(dict):
        def __getitem__(self, key):
            launched.append(key[0])
            return programs[key]

    runner._steps = Watched()
    try:
        plain = SamplingParams(4, temperature=0.0)
        serve(CHUNKED, runner, [((1, 2, 3), plain)])
        assert set(launched) == {"prefill", "decode", "greedy"}
        serve(CHUNKED, runner, [((1, 2, 3), replace(plain, logprobs=1, prompt_logprobs=1))])
        assert launched.count("score") == 1
        assert launched.count("logprobs") == 4
    finally:
        runner._steps = programs
