"""Weights in int8: quantised as they are loaded, or once and for all by `convert`."""

from __future__ import annotations

import json

import numpy as np
import pytest
from flax import nnx

from jaxserve.errors import ConfigError, WeightsError
from jaxserve.models.decoder import abstract_decoder
from jaxserve.models.registry import family_for
from jaxserve.ops.backend import choose
from jaxserve.ops.quant import GROUPS, dequantise, quantise, scale_name
from jaxserve.weights import loader
from jaxserve.weights.convert import convert
from jaxserve.weights.inspection import inspect_model
from jaxserve.weights.loader import held_arrays, held_bytes
from jaxserve.weights.model_files import open_model, served_quantization
from tests.models.paged import Decoder
from tests.models.test_family_figures import CASES, LONGEST, recorded, written
from tests.models.tiny import Source

QUANTIZATIONS = list(GROUPS)
NO_GROUPS = ("deepseek-v2", "deepseek-v2-lite", "deepseek-v3", "qwen2-moe", "qwen3-moe")  # rows of 24 or 48


def load(model, quantization=None, dtype="float32"):
    files = open_model(model)
    try:
        return {k: np.asarray(v) for k, v in files.load_params(dtype, quantization=quantization).items()}
    finally:
        files.close()


def same(one, other) -> None:
    assert list(one) == list(other)
    for name in one:
        assert one[name].dtype == other[name].dtype
        np.testing.assert_array_equal(one[name].view(np.uint8), other[name].view(np.uint8), err_msg=name)


@pytest.mark.parametrize(
    ("name", "quantization"),
    [(n, q) for n in CASES for q in QUANTIZATIONS if n not in NO_GROUPS or q == "int8-channel"],
)
def test_the_decoder_wants_int8_for_all_dense_weights_and_what_is_loaded_is_that(name, quantization):
    config = recorded(name)["config"]
    source = Source("safetensors", config)
    family = family_for(source)
    model = family.config(source)
    shapes = {rule.param: rule.shape for rule in family.rules("safetensors", model)}
    held = held_arrays(shapes, "bfloat16", quantization)
    state = nnx.to_flat_state(nnx.split(abstract_decoder(model, "bfloat16", quantization))[1])
    wanted = {".".join(map(str, path)): leaf for path, leaf in state}
    assert {k: (v.shape, v.dtype) for k, v in held.items()} == {
        k: (v.shape, v.dtype) for k, v in wanted.items()
    }
    for name, leaf in wanted.items():
        assert len(leaf.get_metadata()["logical_axes"]) == len(leaf.shape)
        is_small = name.endswith(("norm.weight", "router.weight", "bias", "sinks", "scale"))
        folded = name.endswith(("key_up", "value_up"))  # of latent attention: multiplied into other things
        assert (leaf.dtype == np.int8) != (is_small or folded), name


@pytest.mark.parametrize(
    ("name", "quantization"),
    [("llama", "int8"), ("llama", "int8-channel"), ("mixtral", "int8"), ("gpt-oss", "int8"),
     ("deepseek-v3", "int8-channel")],
)  # fmt: skip
def test_weights_are_quantised_as_they_are_loaded_and_converting_changes_no_bit(
    name, quantization, tmp_path, monkeypatch
):
    """Parts that are joined, of several layers and experts, and transformed whole or by rows."""
    monkeypatch.setattr(loader, "BLOCK_ELEMENTS", 1000)
    path = written(recorded(name), tmp_path / "model")
    floats, params = load(path), load(path, quantization)
    wanted = {}
    for param, array in floats.items():
        if params[param].dtype != np.int8:
            wanted[param] = array
            continue
        wanted[param], wanted[scale_name(param)] = quantise(array, quantization)
    same(params, wanted)
    assert sum(array.nbytes for array in params.values()) == held_bytes(
        {name: array.shape for name, array in floats.items()}, "float32", quantization
    )


def test_a_converted_folder_is_served_in_int8_and_nothing_else(tiny_gguf, tmp_path):
    loaded = load(tiny_gguf, "int8", "bfloat16")
    folder = convert(tiny_gguf, tmp_path / "int8", quantization="int8")
    same(load(folder, None, "bfloat16"), loaded)
    same(load(folder, "int8", "bfloat16"), loaded)
    same(load(convert(folder, tmp_path / "again"), None, "bfloat16"), loaded)
    files = open_model(folder)
    assert files.param_shapes == open_model(tiny_gguf).param_shapes
    assert served_quantization(files, None) == "int8"
    both = f"quantization=int8-channel: {folder} is stored as int8, "
    for refused in (
        lambda: served_quantization(files, "int8-channel"),
        lambda: files.load_params("bfloat16", quantization="int8-channel"),
        lambda: convert(folder, tmp_path / "other", quantization="int8-channel"),
    ):
        with pytest.raises(ConfigError, match=both):
            refused()


def test_a_converted_folder_of_floats_is_quantised_as_it_is_loaded(tiny_gguf, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxserve.weights.checkpoint.PIECE_BYTES", 1 << 12)
    folder = convert(tiny_gguf, tmp_path / "floats", dtype="float32")
    for quantization in QUANTIZATIONS:
        same(load(folder, quantization), load(tiny_gguf, quantization))


def test_a_folder_made_before_there_was_int8_still_opens(tiny_gguf, tmp_path):
    folder = convert(tiny_gguf, tmp_path / "old")
    data = json.loads((folder / "jaxserve.json").read_text())
    assert data.pop("quantization") is None
    (folder / "jaxserve.json").write_text(json.dumps(data))
    assert open_model(folder).quantization is None
    (folder / "jaxserve.json").write_text(json.dumps(data | {"quantization": "int4"}))
    with pytest.raises(WeightsError, match="quantization 'int4' is not supported: one of int8, int8-channel"):
        open_model(folder)


def test_inspection_tells_int8_and_counts_weights_once(tiny_gguf, tmp_path):
    found = inspect_model(convert(tiny_gguf, tmp_path / "int8", quantization="int8"))
    floats = inspect_model(convert(tiny_gguf, tmp_path / "floats"))
    assert (found.quantization, floats.quantization) == ("int8", None)
    assert found.parameters == floats.parameters
    assert found.would_load
    assert found.types.keys() == {"int8", "float32"}
    assert found.types["int8"].values == floats.types["bfloat16"].values
    files = open_model(tiny_gguf)
    assert found.nbytes == held_bytes(files.param_shapes, "bfloat16", "int8")


def test_an_unknown_quantization_is_an_error_with_the_choices(tiny_gguf):
    with pytest.raises(ConfigError, match="'int4' is not supported: one of int8, int8-channel"):
        open_model(tiny_gguf).load_params("float32", quantization="int4")


@pytest.mark.parametrize(
    ("name", "quantization", "backends"),
    [("mixtral", "int8", ("auto", "xla")), ("gemma3", "int8", ("auto",)),
     ("deepseek-v2-lite", "int8-channel", ("auto",))],
)  # fmt: skip
def test_an_int8_model_gives_what_its_weights_give_as_floats(name, quantization, backends, tmp_path):
    """Experts and a head of its own, a tied head, latent attention."""
    case = recorded(name)
    files = open_model(written(case, tmp_path / "model"))
    config, params = files.config, files.load_params("float32", quantization=quantization)
    floats = {
        name: np.asarray(dequantise(quantise(np.asarray(array), quantization)))
        if params[name].dtype == np.int8
        else array
        for name, array in files.load_params("float32").items()
    }
    prompt = next(iter(case["runs"].values()))["prompt"]
    logits = lambda decoder: decoder.logits([prompt], [[len(prompt)]], queries=LONGEST)[0]
    wanted = logits(Decoder(config, floats))
    for backend in backends:
        chosen = choose(backend, backend, head_dim=config.head_dim)
        got = logits(Decoder(config, params, chosen, quantization))
        # The native kernels take 16 bits of a row; what is quantised otherwise is off by 1 part in 100.
        np.testing.assert_allclose(got, wanted, rtol=0, atol=1e-3 * np.abs(wanted).max())
