"""Scoring clients get the real models' golden log-likelihoods from the server, by `echo` and `logprobs`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import openai
import pytest

from jaxserve.engine.config import EngineConfig
from jaxserve.ops.backend import XLA
from jaxserve.runtime.runner import ModelRunner
from jaxserve.weights.model_files import open_model
from tests.server.running import MODEL, RunningServer
from tests.test_golden import Case, read_cases

CASES = (0, 4)  # the prompts of some 5 and 21 tokens
CONFIG = EngineConfig(
    max_model_len=80, num_pages=7, max_num_seqs=1, max_prefill_tokens=32,
    decode_buckets=(1,), prefill_buckets=((1, 32),),
)  # fmt: skip


class RealServer(RunningServer):
    """As RunningServer, with a model on a device."""

    def __init__(self, path: Path, cache: Path):
        files = open_model(path)
        try:
            super().__init__(config=CONFIG, tokenizer=files.load_tokenizer())
            params = files.load_params("float32")
            self.eos_ids = self.model.tokenizer.eos_ids
            self.runner = ModelRunner(files.config, params, CONFIG, XLA, dtype="float32", cache=cache)
        finally:
            files.close()
        self.runner.release = lambda: None


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma3-270m"])
def served(request: pytest.FixtureRequest) -> Iterator[tuple[openai.OpenAI, list[Case]]]:
    """A client of the model, and its cases."""
    path: Path = request.getfixturevalue(request.param.split("-")[0] + "_gguf")
    cache = request.config.cache.mkdir("compiled-steps")  # compiling takes most of the time
    with (
        RealServer(path, cache) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=600) as client,
    ):
        cases = read_cases(request.param, server.eos_ids)
        yield client, [cases[n] for n in CASES]


def test_echo_with_logprobs_gives_the_golden_log_likelihoods(served):
    """Prompt and reference answer, sent as ids, in several chunks; and the likeliest after each prompt."""
    client, cases = served
    prompts = [[*case.prompt_ids, *case.greedy_ids] for case in cases]
    fields = {"model": MODEL, "echo": True, "logprobs": 10, "temperature": 0}
    answer = client.completions.create(prompt=prompts, max_tokens=1, **fields)
    alone = client.completions.create(prompt=prompts[0], max_tokens=0, **fields)
    assert alone.choices[0].logprobs.token_logprobs == answer.choices[0].logprobs.token_logprobs[:-1]
    for case, prompt, choice in zip(cases, prompts, answer.choices):
        arrays = choice.logprobs
        assert len(arrays.tokens) == len(prompt) + 1
        first, *scores = arrays.token_logprobs[:-1]
        assert first is None
        wanted = np.concatenate([case.prompt_logprobs, case.greedy_logprobs])
        np.testing.assert_allclose(scores, wanted, rtol=0, atol=2e-3)
        at = len(case.prompt_ids)
        likeliest = sorted(arrays.top_logprobs[at].values(), reverse=True)
        np.testing.assert_allclose(likeliest, [value for _, value in case.next_top10], rtol=0, atol=2e-3)
        # What the reference answered greedily is greedy here.
        for token_logprob, top in zip(arrays.token_logprobs[at:-1], arrays.top_logprobs[at:-1]):
            assert token_logprob == max(top.values())
