"""Whatever requests share the device, each is answered as a plain NumPy decoder would answer it alone."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from jaxserve.engine.config import EngineConfig
from jaxserve.ops.backend import Backend
from jaxserve.ops.sampling import sample
from jaxserve.runtime.runner import ModelRunner
from jaxserve.runtime.state import pack_params, unpack_params
from jaxserve.types import SamplingParams
from tests.models import numpy_decoder
from tests.models.tiny import VOCAB
from tests.runtime.conftest import Tiny
from tests.runtime.serving import Job, serve

# Pages and chunks that fall on each other's borders in every way; pools that are too small for all at once.
TIGHT = EngineConfig(
    max_model_len=64, num_pages=26, page_size=4, max_num_seqs=3, max_prefill_tokens=30,
    decode_buckets=(3,), prefill_buckets=((3, 5), (3, 10)),
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


@pytest.mark.parametrize("change", [{"admission": "reserve"}, {"enable_prefix_caching": False}])
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
