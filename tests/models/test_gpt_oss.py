"""gpt-oss beyond the figures of test_family_figures.py: served whole, and its options."""

from __future__ import annotations

import numpy as np
import pytest

from jaxserve.engine.config import EngineConfig
from jaxserve.errors import WeightsError
from jaxserve.models.registry import family_for
from jaxserve.ops.backend import choose
from jaxserve.runtime.runner import ModelRunner
from jaxserve.types import SamplingParams
from tests.models.paged import load
from tests.models.test_family_figures import recorded, written
from tests.models.tiny import Source
from tests.runtime.serving import Job, serve

CASE = recorded("gpt-oss")
SERVED = EngineConfig(
    max_model_len=64, num_pages=40, page_size=4, max_num_seqs=3, max_prefill_tokens=30,
    decode_buckets=(3,), prefill_buckets=((3, 10),),
)  # fmt: skip


def test_the_engine_answers_as_transformers_does_on_the_backend_that_auto_takes(tmp_path):
    """Its gate isn't in the native kernels, its attention with sinks and its dense layers are."""
    config, params = load(written(CASE, tmp_path / "model"))
    backend = choose(head_dim=config.head_dim)
    assert backend.attention_name == choose().attention_name
    runner = ModelRunner(config, params, SERVED, backend, dtype="float32")
    runs = list(CASE["runs"].values())
    greedy = [SamplingParams(len(run["ids"]), temperature=0.0) for run in runs]
    jobs = [Job(tuple(run["prompt"]), params, turn) for turn, (run, params) in enumerate(zip(runs, greedy))]
    assert serve(SERVED, runner, jobs) == [run["ids"] for run in runs]


def test_another_limit_of_the_gate_is_refused():
    with pytest.raises(WeightsError, match=r"swiglu_limit = 5\.0 is not supported; supported: 7\.0"):
        read(swiglu_limit=5.0)


def test_a_model_without_biases_of_attention_has_none():
    config = read(attention_bias=False)
    assert (config.qkv_bias, config.out_bias) == (False, False)


def test_windows_are_in_every_other_layer_where_the_file_does_not_say():
    windows = [layer.window for layer in read(layer_types=None).layers]
    np.testing.assert_array_equal(windows, [8, None, 8, None])


def read(**changes):
    data = CASE["config"] | changes
    source = Source("safetensors", {key: value for key, value in data.items() if value is not None})
    return family_for(source).config(source)
