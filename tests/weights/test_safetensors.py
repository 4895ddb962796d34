from __future__ import annotations

import contextlib
import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from jaxserve.errors import WeightsError
from jaxserve.weights.safetensors import INDEX, SINGLE, SafetensorsSource

RNG = np.random.default_rng(0)
TENSORS = {
    "f32": RNG.standard_normal((5, 7), np.float32),
    "f16": RNG.standard_normal((4, 3)).astype(np.float16),
    "bf16": RNG.standard_normal((6, 2, 3)).astype(ml_dtypes.bfloat16),
    "vector": RNG.standard_normal(9).astype(np.float32),
    "scalar": np.array(3.0, np.float32),
}


def write_single(folder: Path) -> Path:
    (folder / "config.json").write_text('{"architectures": ["X"], "n": 1}')
    save_file(TENSORS, folder / SINGLE)
    return folder


def write_sharded(folder: Path) -> Path:
    (folder / "config.json").write_text("{}")
    shards = {"a.safetensors": ["f32", "bf16"], "b.safetensors": ["f16", "vector", "scalar"]}
    for filename, names in shards.items():
        save_file({name: TENSORS[name] for name in names}, folder / filename)
    weight_map = {name: filename for filename, names in shards.items() for name in names}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


def read_everything(folder: Path) -> None:
    source = SafetensorsSource(folder)
    for name in source.tensors:
        source.read(name)
    source.close()


@pytest.mark.parametrize("write", [write_single, write_sharded])
def test_what_was_saved_is_read_whole_and_by_rows(write, tmp_path):
    source = SafetensorsSource(write(tmp_path))
    assert set(source.tensors) == set(TENSORS)
    for name, expected in TENSORS.items():
        info = source.tensors[name]
        assert (info.shape, info.nbytes) == (expected.shape, expected.nbytes)
        assert source.read(name).dtype == expected.dtype
        np.testing.assert_array_equal(source.read(name), expected)
        if expected.ndim:
            np.testing.assert_array_equal(source.read_rows(name, 1, 3), expected[1:3])


def test_metadata_are_config_json(tmp_path):
    assert SafetensorsSource(write_single(tmp_path)).metadata == {"architectures": ["X"], "n": 1}


def test_a_missing_shard_is_named(tmp_path):
    (write_sharded(tmp_path) / "b.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"b\.safetensors: can't be opened: No such file"):
        SafetensorsSource(tmp_path)


def test_an_index_that_names_a_tensor_its_shard_lacks_is_an_error(tmp_path):
    path = write_sharded(tmp_path) / INDEX
    index = json.loads(path.read_text())
    index["weight_map"]["ghost"] = "a.safetensors"
    path.write_text(json.dumps(index))
    with pytest.raises(WeightsError, match=r"'ghost' is in a\.safetensors, which lacks it"):
        SafetensorsSource(tmp_path)


def test_a_tensor_in_two_shards_is_an_error(tmp_path):
    write_sharded(tmp_path)
    save_file({n: TENSORS[n] for n in ("f16", "vector", "scalar", "f32")}, tmp_path / "b.safetensors")
    with pytest.raises(WeightsError, match=r"'f32' is in two shards, a\.safetensors and b\.safetensors"):
        SafetensorsSource(tmp_path)


def test_a_tensor_twice_in_one_header_is_an_error(tmp_path):
    write_single(tmp_path)
    entry = '"w":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}'
    header = f"{{{entry},{entry}}}".encode()
    (tmp_path / SINGLE).write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(WeightsError, match="corrupt"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("filename", ["../outside.safetensors", "/etc/passwd", 3, None, "a/b.safetensors"])
def test_an_index_can_not_point_out_of_its_folder(filename, tmp_path):
    path = write_sharded(tmp_path) / INDEX
    path.write_text(json.dumps({"weight_map": {"f32": filename}}))
    with pytest.raises(WeightsError, match="is no file name"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("filename", ["config.json", INDEX])
@pytest.mark.parametrize("text", ["", "{", "[]", "null", '"x"', '{"a":1,"a":2}', "\xff", "[" * 100_000])
def test_bad_json_is_an_error_that_names_the_file(filename, text, tmp_path):
    (write_sharded(tmp_path) / filename).write_text(text, encoding="latin-1")
    with pytest.raises(WeightsError, match=filename.replace(".", r"\.")):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": ["a"]}'])
def test_an_index_without_a_map_is_an_error(text, tmp_path):
    (write_sharded(tmp_path) / INDEX).write_text(text)
    with pytest.raises(WeightsError, match="weight_map"):
        SafetensorsSource(tmp_path)


@pytest.mark.parametrize("filename", ["config.json", SINGLE])
def test_a_missing_file_is_named(filename, tmp_path):
    (write_single(tmp_path) / filename).unlink()
    with pytest.raises(WeightsError, match=filename.replace(".", r"\.")):
        SafetensorsSource(tmp_path)


def test_a_type_that_is_no_weight_is_an_error_when_it_is_read(tmp_path):
    write_single(tmp_path)
    save_file({"ids": np.arange(3)}, tmp_path / SINGLE)
    source = SafetensorsSource(tmp_path)
    with pytest.raises(WeightsError, match="'ids' is I64"):
        source.read("ids")


def test_a_file_cut_off_anywhere_is_an_error(tmp_path):
    whole = (write_single(tmp_path) / SINGLE).read_bytes()
    for cut in range(len(whole)):
        (tmp_path / SINGLE).write_bytes(whole[:cut])
        with pytest.raises(WeightsError, match=r"model\.safetensors: (corrupt or )?truncated"):
            SafetensorsSource(tmp_path)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_corrupt_bytes_give_an_error_or_a_model_never_a_traceback(data, tmp_path):
    broken = bytearray((write_single(tmp_path) / SINGLE).read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        broken[data.draw(st.integers(0, 500))] = data.draw(st.integers(0, 255))
    (tmp_path / SINGLE).write_bytes(broken)
    with contextlib.suppress(WeightsError):
        read_everything(tmp_path)
