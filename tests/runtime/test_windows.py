"""A model of windows alone: its pages are given back as they slide out of sight, and its answers stay."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.kv_pages import KVPages
from jaxserve.runtime.runner import ModelRunner
from jaxserve.types import SamplingParams
from tests.models.tiny import VOCAB
from tests.runtime.serving import Job, serve

WINDOW = 9
AMPLE = EngineConfig(
    max_model_len=120, num_pages=100, page_size=4, max_num_seqs=3, max_prefill_tokens=8,
    decode_buckets=(3,), prefill_buckets=((1, 8),),
)  # fmt: skip
# 5 pages hold what one sequence sees and writes, 30 would hold all of it.
TIGHT = replace(AMPLE, num_pages=1 + 5, window=WINDOW)
VARIANTS = {
    "alone": TIGHT,
    "without prefix cache": replace(TIGHT, enable_prefix_caching=False),
    "together": replace(TIGHT, num_pages=1 + 10),  # two have room, and three are let in
    "reserved": replace(TIGHT, num_pages=1 + 10, admission="reserve"),
}


@pytest.fixture(scope="module")
def runner(llama, backend) -> ModelRunner:
    """One for all: what is compiled depends on neither the window nor, but for the pool, the pages."""
    layers = tuple(replace(layer, window=WINDOW) for layer in llama.model.layers)
    return replace(llama, model=replace(llama.model, layers=layers)).runner(AMPLE, backend)


def jobs() -> list[Job]:
    rng = np.random.default_rng(5)
    stem = rng.integers(VOCAB, size=50).tolist()
    made = []
    for number, (shared, own, length) in enumerate([(50, 3, 60), (50, 20, 40), (0, 5, 100), (50, 2, 30)]):
        prompt = (*stem[:shared], *rng.integers(VOCAB, size=own).tolist())
        params = SamplingParams(length, temperature=1.0, seed=number)
        made.append(Job(prompt, params, turn=12 * number))
    return made


@pytest.mark.parametrize("variant", VARIANTS)
def test_answers_are_those_of_a_pool_that_keeps_everything(runner, variant, monkeypatch):
    wanted = serve(AMPLE, runner, jobs())
    most_held, slide = 0, KVPages.slide

    def watched(self, seq):
        nonlocal most_held
        most_held = max(most_held, len(seq.pages) - seq.num_slid)
        slide(self, seq)

    monkeypatch.setattr(KVPages, "slide", watched)
    # Nothing that an earlier run left behind is of use: what is read must have been written since.
    runner._kv = jax.tree.map(lambda pool: jnp.full_like(pool, jnp.nan), runner._kv)
    assert serve(VARIANTS[variant], runner, jobs()) == wanted
    assert 0 < most_held <= VARIANTS[variant].most_pages == 5
