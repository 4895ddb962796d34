"""Tiny models, written in both formats, against a NumPy decoder that knows neither pages nor batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from flax import nnx

from jaxserve.models.decoder import abstract_decoder
from jaxserve.models.registry import family_for
from tests.models import numpy_decoder
from tests.models.paged import Decoder, load
from tests.models.tiny import CONFIGS, GEMMA3, LLAMA, VOCAB, Source, hf_tensors, write_gguf, write_hf

IDS = np.random.default_rng(5).integers(VOCAB, size=30).tolist()


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
