"""Keys and values in int8: what is asked of any pool, of one that rounds."""

from __future__ import annotations

from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.config import EngineConfig
from jaxserve.ops.backend import XLA
from jaxserve.runtime.runner import ModelRunner
from jaxserve.types import SamplingParams
from tests.models.tiny import VOCAB
from tests.runtime.serving import Job, serve

AMPLE = EngineConfig(
    max_model_len=64, num_pages=60, page_size=4, max_num_seqs=3, max_prefill_tokens=8,
    decode_buckets=(3,), prefill_buckets=((1, 8),), deterministic=True,
)  # fmt: skip
TIGHT = replace(AMPLE, num_pages=26)  # preempts


@pytest.fixture(scope="module")
def runner(gemma3, backend) -> ModelRunner:
    if backend is XLA:
        pytest.skip("XLA's bits depend on the batch; tests/ops/test_attention.py compares its attention")
    params = dict(gemma3.params)
    return ModelRunner(gemma3.model, params, AMPLE, backend, dtype="float32", kv_dtype="int8")


def jobs() -> list[Job]:
    rng = np.random.default_rng(3)
    stem = rng.integers(VOCAB, size=32).tolist()
    return [
        Job((*stem[:shared], *rng.integers(VOCAB, size=own).tolist()), SamplingParams(20, seed=n), turn=3 * n)
        for n, (shared, own) in enumerate([(32, 2), (32, 9), (16, 3), (0, 12), (32, 2), (24, 1)])
    ]


def test_answers_are_those_of_each_request_alone_through_hits_and_preemptions(runner):
    alone = replace(AMPLE, enable_prefix_caching=False)
    wanted = [serve(alone, runner, [replace(job, turn=0)])[0] for job in jobs()]
    assert serve(TIGHT, runner, jobs()) == wanted


def test_the_pool_is_int8_and_takes_its_part_of_the_memory(runner):
    model = runner.model
    assert {pool.dtype for pool in runner._kv} == {jnp.dtype(jnp.int8)}
    nbytes = sum(pool.nbytes for pool in runner._kv)
    heads = 2 * model.num_layers * AMPLE.num_pages * AMPLE.page_size * model.num_kv_heads
    assert nbytes == heads * (model.head_dim + 4)
