"""Both real models: a prefix hit answers as a miss does, and a preempted request as if it had been alone."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from jaxserve.engine.config import EngineConfig
from jaxserve.ops.backend import choose
from jaxserve.runtime.runner import ModelRunner
from jaxserve.types import SamplingParams
from jaxserve.weights.model_files import open_model
from tests.runtime.bits import Recorder
from tests.runtime.serving import Job

GOLDEN = Path(__file__).parent / "data" / "golden"
NUM_PROMPT = 600  # past Gemma's window of 512, and a part of a chunk more than four of them
DETERMINISTIC = EngineConfig(
    max_model_len=640, num_pages=90, max_num_seqs=2, max_prefill_tokens=128, min_prefill_queries=128,
    max_logprobs=5, deterministic=True,
)  # fmt: skip
# The same compiled steps, and chunks that begin where those of a miss do; all else as by default.
DEFAULT = replace(DETERMINISTIC, deterministic=False, prefix_alignment=128)
MODELS = {"smollm2-135m": "float32", "gemma3-270m": "bfloat16"}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> tuple[Recorder, tuple[int, ...]]:
    """A model's compiled steps, and the beginning of its longest golden prompt."""
    name, dtype = request.param, MODELS[request.param]
    files = open_model(request.getfixturevalue(name.split("-")[0] + "_gguf"))
    try:
        backend = choose(head_dim=files.config.head_dim)
        params = files.load_params(dtype)
    finally:
        files.close()
    cache = request.config.cache.mkdir("compiled-steps")
    recorder = Recorder(
        ModelRunner(files.config, params, DETERMINISTIC, backend, dtype=dtype, cache=cache)
    )
    cases = json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))["generate"]
    return recorder, tuple(max((one["prompt_ids"] for one in cases), key=len)[:NUM_PROMPT])


@pytest.mark.parametrize("config", [DEFAULT, DETERMINISTIC], ids=["default", "deterministic"])
def test_a_hit_has_the_logits_of_a_miss(model, config):
    recorder, prompt = model
    params = SamplingParams(3, temperature=0.0, logprobs=5, seed=1)
    jobs = [Job(prompt, params), Job(prompt, replace(params, seed=2), turn=20)]
    (miss, hit), _ = recorder.answer(config, jobs)
    assert (miss.num_cached, hit.num_cached) == (0, 512)
    assert sorted(miss.logits) == [NUM_PROMPT, NUM_PROMPT + 1, NUM_PROMPT + 2]
    assert replace(hit, num_cached=0) == miss


@pytest.mark.parametrize("config", [DEFAULT, DETERMINISTIC], ids=["default", "deterministic"])
@pytest.mark.parametrize("model", ["smollm2-135m"], indirect=True)
def test_preempted_requests_are_answered_as_if_alone(model, config):
    """Greedy and seeded ids in either mode; in the deterministic one the bits of all logits as well."""
    recorder, text = model
    tight = replace(config, max_model_len=48, num_pages=5)  # 4 pages for two sequences of 3
    greedy = SamplingParams(22, temperature=0.0, seed=1)
    drawn = SamplingParams(22, temperature=0.8, top_p=0.95, seed=2)
    jobs = [Job(text[:12], greedy), Job(text[40:53], drawn)]
    together, stats = recorder.answer(tight, jobs)
    assert stats.num_preemptions > 0
    alone = [recorder.answer(tight, [job])[0][0] for job in jobs]
    assert [told.ids for told in together] == [told.ids for told in alone]
    if config.deterministic:
        assert together == alone
