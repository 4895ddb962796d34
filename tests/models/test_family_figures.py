"""Every family, from a folder of safetensors as users have it, against what transformers answered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.models.config import ModelConfig
from jaxserve.models.rope_scaling import at_length
from jaxserve.ops.backend import choose
from tests.models import family_weights
from tests.models.paged import Decoder, load
from tests.models.tiny import write_hf

FOLDER = Path(__file__).parent / "families"
# What has another answer by design, or none: see the tests at the end.
OTHERS = ("llama-dynamic", "qwen3-moe-mixed")
CASES = sorted(path.stem for path in FOLDER.glob("*.json") if path.stem not in OTHERS)
# Once more with the device's own kernels: windows, soft caps, biases, parts of heads, experts, sinks.
NATIVE = ("mistral", "gemma2", "qwen2", "phi4-mini", "qwen2-moe", "qwen3-moe", "gpt-oss")
LONGEST = 40  # prompt that is recorded
TOLERANCE = 3e-4  # of logits in float32; a feature left out moves some by 0.02 and more


def recorded(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


def written(case: dict[str, Any], folder: Path) -> Path:
    """The case's model as a Hugging Face folder."""
    tensors = family_weights.tensors(case["config"], case["shapes"])
    assert family_weights.checksum(tensors) == case["weights_crc32"], "the weights are not those recorded"
    return write_hf(folder, case["config"], tensors)


def close(got: np.ndarray, wanted: list[float]) -> None:
    np.testing.assert_allclose(got, wanted, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize(
    ("name", "backend"), [*((name, "xla") for name in CASES), *((name, "auto") for name in NATIVE)]
)
def test_prefill_chunks_and_decode_give_what_transformers_gave(name, backend, tmp_path):
    check_runs(recorded(name), backend, tmp_path)


def check_runs(case: dict[str, Any], backend: str, folder: Path) -> None:
    """The case's prompts whole, in chunks and a token at a time are answered as its runs say."""
    config, params = load(written(case, folder / "model"))
    chosen = choose(backend, backend, head_dim=config.head_dim)
    decoders: dict[ModelConfig, Decoder] = {}  # two, where the length of the context makes a difference
    for run in case["runs"].values():
        prompt, ids = run["prompt"], run["ids"]
        exact = at_length(config, len(prompt) + len(ids))
        if exact not in decoders:
            decoders[exact] = Decoder(exact, params, chosen)
        decoder = decoders[exact]
        (whole,) = decoder.logits([prompt], [[len(prompt)]], queries=LONGEST)
        for position, wanted in run["logits"].items():
            close(whole[int(position)], wanted)
        # The prompt in chunks, past the window where there is one, then a token at a time.
        chunks = [7] * (len(prompt) // 7)
        chunks += [len(prompt) - sum(chunks)] if len(prompt) % 7 else []
        chunks += [1] * (len(ids) - 1)
        (steps,) = decoder.logits([prompt + ids[:-1]], [chunks], queries=7)
        assert steps[len(prompt) - 1 :].argmax(-1).tolist() == ids
        close(steps[-1], run["last_logits"])


def test_dynamic_ntk_follows_the_longest_context_that_is_served(tmp_path):
    """transformers turns later tokens by other frequencies than those before, as a sequence grows."""
    case = recorded("llama-dynamic")
    config, params = load(written(case, tmp_path / "model"))
    for run in case["runs"].values():
        prompt = run["prompt"]
        decoder = Decoder(at_length(config, len(prompt)), params)
        (whole,) = decoder.logits([prompt], [[len(prompt)]], queries=len(prompt))
        for position, wanted in run["logits"].items():
            close(whole[int(position)], wanted)
