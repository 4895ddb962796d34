"""Whatever requests share the device, each is answered as a plain NumPy decoder would answer it alone."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.plan import Plan, Row, Step
from jaxserve.ops.backend import Backend
from jaxserve.ops.sampling import sample
from jaxserve.runtime.compilations import CompilationCounter
from jaxserve.runtime.runner import ModelRunner
from jaxserve.runtime.state import ENDED, pack_params, unpack_params
from jaxserve.types import SamplingParams
from tests.models import numpy_decoder
from tests.models.tiny import VOCAB
from tests.runtime.conftest import Tiny
from tests.runtime.serving import Job, serve

# Pages and chunks that fall on each other's borders in every way; pools that are too small for all at once.
TIGHT = EngineConfig(
    max_model_len=64, num_pages=26, page_size=4, max_num_seqs=3, max_prefill_tokens=30,
    decode_buckets=(3,), prefill_buckets=((3, 5), (3, 10)), decode_steps=6,
)  # fmt: skip
WIDE = EngineConfig(
    max_model_len=64, num_pages=21, page_size=16, max_num_seqs=5, max_prefill_tokens=240,
    decode_buckets=(5,), prefill_buckets=((5, 16), (5, 48)),
)  # fmt: skip

draw = jax.jit(lambda logits, rows, position: sample(logits, unpack_params(rows), position))


def alone(tiny: Tiny, job: Job) -> list[int]:
    """The answer worked out without pages, batches, chunks or a cache."""
    ids = list(job.prompt_ids)
    for _ in range(job.params.max_tokens):
        logits = numpy_decoder.logits(tiny.hf_config, tiny.hf_tensors, ids)[-1:].astype(np.float32)
        ids.append(int(draw(logits, pack_params(job.params)[None], np.array([len(ids)], np.int32))[0]))
    return ids[len(job.prompt_ids) :]


def random_jobs(rng: np.random.Generator, num: int) -> list[Job]:
    stem = rng.integers(VOCAB, size=40).tolist()  # prompts begin alike now and then
    jobs = []
    for _ in range(num):
        shared = int(rng.choice([0, 0, 8, 17, 32]))
        own = int(rng.integers(1, 50 - shared))
        prompt = tuple(stem[:shared] + rng.integers(VOCAB, size=own).tolist())
        params = SamplingParams(int(rng.integers(1, min(14, 65 - len(prompt)))), temperature=0.0)
        if rng.random() < 0.6:
            params = replace(
                params,
                temperature=float(rng.choice([0.5, 1.0, 2.0])),
                top_k=int(rng.choice([0, 4])),
                top_p=float(rng.choice([1.0, 0.7])),
                min_p=float(rng.choice([0.0, 0.1])),
                seed=int(rng.integers(2**64, dtype=np.uint64)),
            )
        jobs.append(Job(prompt, params, turn=int(rng.integers(0, 40))))
    return jobs


@pytest.fixture(scope="module", params=["gemma3-tight", "llama-wide"])
def served(request: pytest.FixtureRequest, backend: Backend) -> tuple[Tiny, EngineConfig, ModelRunner]:
    family, size = request.param.split("-")
    if (family, backend.attention_name) == ("llama", "xla"):
        pytest.skip("one pair of model and sizes for each backend is enough")
    tiny, config = request.getfixturevalue(family), {"tight": TIGHT, "wide": WIDE}[size]
    return tiny, config, tiny.runner(config, backend)


@pytest.mark.parametrize("seed", range(3))
def test_every_answer_is_that_of_the_request_alone(served, seed):
    tiny, config, runner = served
    jobs = random_jobs(np.random.default_rng(seed), 12)
    assert serve(config, runner, jobs) == [alone(tiny, job) for job in jobs]


@pytest.mark.parametrize(
    "change", [{"admission": "reserve"}, {"enable_prefix_caching": False}, {"decode_steps": 1}]
)
def test_answers_do_not_depend_on_how_pages_are_given_out(served, change):
    tiny, config, runner = served
    jobs = random_jobs(np.random.default_rng(7), 8)
    assert serve(replace(config, **change), runner, jobs) == [alone(tiny, job) for job in jobs]


def test_one_seed_gives_one_answer_whatever_the_slot_and_another_seed_another(served):
    _, config, runner = served
    prompt = tuple(range(9))
    params = SamplingParams(12, temperature=1.5, seed=2**64 - 3)
    others = random_jobs(np.random.default_rng(11), 5)
    first = serve(config, runner, [Job(prompt, params)])[0]
    later = serve(config, runner, [*others, Job(prompt, params, turn=7)])[-1]
    assert first == later
    assert first != serve(config, runner, [Job(prompt, replace(params, seed=2**64 - 4))])[0]
    assert first != serve(config, runner, [Job(prompt, replace(params, seed=2**32 - 3))])[0]  # the low half


def test_an_answer_ends_with_its_first_end_of_sequence_id(served):
    tiny, config, runner = served
    eos_ids = frozenset(range(0, VOCAB, 5))
    jobs = random_jobs(np.random.default_rng(13), 14)
    answers = serve(config, runner, jobs, eos_ids)
    for job, answer in zip(jobs, answers):
        whole = alone(tiny, job)
        end = next((n for n, i in enumerate(whole, 1) if i in eos_ids), len(whole))
        assert answer == whole[:end]
    assert sum(answer[-1] in eos_ids for answer in answers) > 2


def test_several_steps_a_launch_compile_nothing_and_run_greedy_and_random(served):
    _, config, runner = served
    if config.decode_steps == 1:
        pytest.skip("this one runs step by step")
    seen = set()
    loop = runner._loop
    runner._loop = lambda step, sampler: (seen.add(sampler), loop(step, sampler))[1]
    counter = CompilationCounter()
    try:
        with jax.no_tracing():
            for temperature in (0.0, 1.0):
                serve(config, runner, [Job((1, 2, 3), SamplingParams(9, temperature=temperature))])
        assert counter.count == 0
        assert seen == {"greedy", "random"}
    finally:
        del runner._loop
        counter.close()


def test_a_launch_of_several_steps_writes_nothing_behind_the_end_of_a_sequence(served):
    _, config, runner = served
    if config.decode_steps == 1:
        pytest.skip("this one runs step by step")
    prompt, params = (5, 6, 7), SamplingParams(8, temperature=1.5, seed=4)
    whole = serve(config, runner, [Job(prompt, params)])[0]
    num_ids = next(n for n in range(2, 6) if whole[n - 1] not in whole[: n - 1])
    rows = [
        Row(slot, 0, 3, prompt, 0, (page,), True, params, end_ids)
        for slot, page, end_ids in ((0, 1, (whole[num_ids - 1],)), (1, 5, ()))
    ]
    runner.launch(Plan((Step("prefill", 3, 5, tuple(rows)),)))

    def keys_from(position: int) -> np.ndarray:
        """Those of the first row, in pages 1, 2 and 3."""
        return np.asarray(runner._kv.keys)[:, 4 + position : 16].copy()

    before = keys_from(3 + num_ids - 1)
    rows = [
        Row(0, 3, 6, None, 1, (2, 3), True, None),
        Row(1, 3, 4, None, 1, (6,), True, None),
    ]
    handle = runner.launch(Plan((Step("decode", 3, 1, tuple(rows), 6),)))
    (result,) = runner.fetch(handle)
    assert list(result.token_ids[: num_ids - 1]) == whole[1:num_ids]
    assert list(result.token_ids[6:10]) == whole[1:5]
    np.testing.assert_array_equal(keys_from(3 + num_ids - 1), before)
    assert np.asarray(runner._state.last_id)[:2].tolist() == [ENDED, whole[4]]
