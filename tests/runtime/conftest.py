"""Tiny models as loaded parameters, and every backend that can run here."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxserve import native
from jaxserve.engine.config import EngineConfig
from jaxserve.models.config import ModelConfig
from jaxserve.ops.backend import XLA, Backend, choose
from jaxserve.runtime.runner import ModelRunner
from jaxserve.weights.model_files import open_model
from tests.models.tiny import CONFIGS, Tensors, hf_tensors, write_hf


@dataclass(frozen=True)
class Tiny:
    """A tiny model in float32: as transformers would see it, and loaded."""

    hf_config: dict[str, Any]
    hf_tensors: Tensors
    model: ModelConfig
    params: dict[str, jax.Array]

    def runner(self, config: EngineConfig, backend: Backend, cache: Path | None = None) -> ModelRunner:
        return ModelRunner(self.model, dict(self.params), config, backend, dtype="float32", cache=cache)


def _load(family: str, folder: Path) -> Tiny:
    tensors = hf_tensors(CONFIGS[family], seed=2)
    files = open_model(write_hf(folder / family, CONFIGS[family], tensors))
    try:
        return Tiny(CONFIGS[family], tensors, files.config, files.load_params("float32"))
    finally:
        files.close()


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return _load("llama", tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def gemma3(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return _load("gemma3", tmp_path_factory.mktemp("tiny"))


# Chunks of 10 and prompts of up to 40: what is after a position is often the first token of the next chunk.
CHUNKED = EngineConfig(
    max_model_len=48, num_pages=40, page_size=4, max_num_seqs=3, max_prefill_tokens=30, max_logprobs=6,
    decode_buckets=(3,), prefill_buckets=((3, 10),),
)  # fmt: skip


@pytest.fixture(scope="session")
def chunked(gemma3: Tiny) -> tuple[Tiny, ModelRunner]:
    """A model, and a runner of it for CHUNKED: one for several modules, as it takes seconds to compile."""
    return gemma3, gemma3.runner(CHUNKED, choose(head_dim=gemma3.model.head_dim))


@pytest.fixture(scope="session", params=["xla", "native"])
def backend(request: pytest.FixtureRequest) -> Backend:
    if request.param == "xla":
        return XLA
    usable, reason = native.available()
    if not usable:
        pytest.skip(f"the C++ kernels can't be used: {reason}")
    return choose("native", "native")
