"""Tiny models, written in both formats, against a NumPy decoder that knows neither pages nor batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import Batch, KVCache, abstract_decoder
from jaxserve.models.registry import family_for
from jaxserve.ops.backend import XLA
from jaxserve.runtime.runner import order_params
from jaxserve.weights.model_files import open_model
from tests.models import numpy_decoder
from tests.models.tiny import CONFIGS, GEMMA3, LLAMA, VOCAB, Source, hf_tensors, write_gguf, write_hf

PAGE_SIZE, NUM_PAGES = 8, 20
IDS = np.random.default_rng(5).integers(VOCAB, size=30).tolist()


class Decoder:
    """A loaded decoder, run over pages: sequences are rows, fed in chunks of at most `queries`."""

    def __init__(self, model: ModelConfig, params: dict[str, jax.Array]):
        decoder = abstract_decoder(model, "float32")
        graph, abstract = nnx.split(decoder)
        structure = jax.tree.structure(abstract)
        self._leaves = order_params(decoder, params)
        shape = (model.num_layers, NUM_PAGES * PAGE_SIZE, model.num_kv_heads, model.head_dim)
        # What nobody wrote is NaN: reading it would show.
        self._kv = KVCache(np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32))

        @jax.jit
        def run(leaves: Any, kv: KVCache, batch: Batch) -> Any:
            merged = nnx.merge(graph, jax.tree.unflatten(structure, leaves))
            hidden, kv = merged.hidden(kv, batch, XLA, page_size=PAGE_SIZE)
            return merged.logits(hidden, XLA), kv

        self._run = run

    def logits(self, sequences: list[list[int]], chunks: list[list[int]], queries: int) -> list[np.ndarray]:
        """Logits [T, V] of each sequence; chunks[i][j] tokens of sequence i go into step j."""
        B, kv = len(sequences), self._kv
        per_row = (NUM_PAGES - 1) // B
        table = 1 + np.random.default_rng(B).permutation(NUM_PAGES - 1)[: B * per_row].reshape(B, per_row)
        out: list[list[np.ndarray]] = [[] for _ in sequences]
        start = np.zeros(B, np.int32)
        for step in range(len(chunks[0])):
            tokens, lens = np.zeros((B, queries), np.int32), np.zeros(B, np.int32)
            for row, ids in enumerate(sequences):
                lens[row] = chunks[row][step]
                tokens[row, : lens[row]] = ids[start[row] : start[row] + lens[row]]
            logits, kv = self._run(self._leaves, kv, Batch(tokens, table.astype(np.int32), start, lens))
            for row in range(B):
                out[row].append(np.asarray(logits[row, : lens[row]]))
            start = start + lens
        return [np.concatenate(parts) for parts in out]


@pytest.fixture(scope="module", params=["llama", "gemma3", "llama tied", "gemma3 untied"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ...]:
    """(config.json, tensors, folder, GGUF file) of one tiny model."""
    family, *tied = request.param.split()
    config = CONFIGS[family] | ({"tie_word_embeddings": tied == ["tied"]} if tied else {})
    tensors = hf_tensors(config)
    folder = tmp_path_factory.mktemp("tiny")
    return (
        config,
        tensors,
        write_hf(folder / "hf", config, tensors),
        write_gguf(folder / "model.gguf", config, tensors),
    )


def load(path: Path) -> tuple[ModelConfig, dict[str, jax.Array]]:
    files = open_model(path)
    try:
        return files.config, files.load_params("float32")
    finally:
        files.close()


def test_both_formats_load_as_the_same_model(model):
    _, _, folder, file = model
    (config, params), (other, others) = load(folder), load(file)
    # GGUF keeps these as float32.
    assert config.rms_norm_eps == pytest.approx(other.rms_norm_eps, rel=1e-6)
    assert config.to_json() | {"rms_norm_eps": 0} == other.to_json() | {"rms_norm_eps": 0}
    assert params.keys() == others.keys()
    for name in params:
        np.testing.assert_array_equal(params[name], others[name], err_msg=name)


def test_logits_equal_those_of_a_plain_numpy_decoder(model):
    config, tensors, folder, _ = model
    decoder = Decoder(*load(folder))
    wanted = numpy_decoder.logits(config, tensors, IDS)
    (whole,) = decoder.logits([IDS], [[30]], queries=32)
    np.testing.assert_allclose(whole, wanted, rtol=0, atol=2e-4)
    assert np.ptp(wanted) > 2, "logits too flat to tell anything"


@pytest.mark.parametrize("family", CONFIGS)
def test_chunks_and_decode_steps_equal_one_prefill(family, tmp_path):
    config = CONFIGS[family]
    tensors = hf_tensors(config, seed=1)
    decoder = Decoder(*load(write_hf(tmp_path / "hf", config, tensors)))
    sequences = [IDS, IDS[3:20], IDS[::-1]]
    wanted = [numpy_decoder.logits(config, tensors, ids) for ids in sequences]
    # Chunks that end inside pages, at their ends, past the window; empty rows; one token at a time.
    chunks = [[10, 0, 6, 8, 1, 5], [1, 1, 10, 0, 2, 3], [0, 10, 10, 8, 1, 1]]
    for got, right in zip(decoder.logits(sequences, chunks, queries=10), wanted):
        np.testing.assert_allclose(got, right, rtol=0, atol=2e-4)
    singles = [[1] * 12] * 3
    for got, right in zip(decoder.logits([ids[:12] for ids in sequences], singles, queries=1), wanted):
        np.testing.assert_allclose(got, right[:12], rtol=0, atol=2e-4)


def test_a_window_and_a_second_rope_base_make_a_difference():
    """The oracle would not notice a decoder without them if they changed nothing."""
    tensors = hf_tensors(GEMMA3)
    plain = numpy_decoder.logits(GEMMA3, tensors, IDS)
    for key, value in (("sliding_window", 30), ("rope_local_base_freq", 1e6), ("sliding_window_pattern", 1)):
        change = {key: value}
        assert np.abs(numpy_decoder.logits(GEMMA3 | change, tensors, IDS) - plain).max() > 1e-2


def test_parameters_carry_logical_axes():
    for config in (LLAMA, GEMMA3):
        source = Source("safetensors", config)
        state = nnx.split(abstract_decoder(family_for(source).config(source), "bfloat16"))[1]
        for path, leaf in nnx.to_flat_state(state):
            axes = leaf.get_metadata("logical_axes")
            assert len(axes) == len(leaf.shape), path
            assert "layers" in axes or path[0] != "layers"
