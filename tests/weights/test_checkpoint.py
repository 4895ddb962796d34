from __future__ import annotations

import json
import shutil
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxserve.errors import WeightsError
from jaxserve.models.config import LayerConfig, ModelConfig
from jaxserve.weights.checkpoint import PARAMS, load_checkpoint_params, write_checkpoint
from jaxserve.weights.loader import aligned_empty
from jaxserve.weights.manifest import MANIFEST, read_manifest

CONFIG = ModelConfig(
    family="llama", vocab_size=9, hidden_size=4, intermediate_size=8, num_heads=2, num_kv_heads=1, head_dim=2,
    max_position=16, rms_norm_eps=1e-5, attention_scale=0.5, activation="silu", tie_embeddings=True,
    embedding_scale=None, qk_norm=False, post_norms=False,
    layers=(LayerConfig(None, 1e4), LayerConfig(8, 1e6)),
)  # fmt: skip
RNG = np.random.default_rng(0)
ARRAYS = {
    "embedding.weight": RNG.standard_normal((300, 40)).astype(ml_dtypes.bfloat16),
    "layers.0.attention_norm.weight": RNG.standard_normal(4).astype(np.float32),
    "layers.0.attention.qkv.weight": RNG.standard_normal((8, 4)).astype(ml_dtypes.bfloat16),
}


def write(folder: Path, arrays: dict[str, np.ndarray] = ARRAYS, dtype: str = "bfloat16") -> Path:
    folder.mkdir()
    (folder / "tokenizer.json").write_text("{}")
    write_checkpoint(folder, arrays, CONFIG, dtype=dtype, source="m.gguf")
    return folder


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("checkpoint") / "ck")


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "ck"))


def test_a_checkpoint_restores_what_was_written(written):
    manifest = read_manifest(written)
    assert (manifest.config, manifest.dtype, manifest.source) == (CONFIG, "bfloat16", "m.gguf")
    params = load_checkpoint_params(written, "bfloat16")
    assert list(params) == list(ARRAYS)
    for name, expected in ARRAYS.items():
        assert isinstance(params[name], jax.Array)
        assert params[name].dtype == expected.dtype
        np.testing.assert_array_equal(np.asarray(params[name]), expected)


def test_another_dtype_is_cast_exactly_and_vectors_stay_float32(written, tmp_path):
    wide = load_checkpoint_params(written, "float32")
    for name, expected in ARRAYS.items():
        assert wide[name].dtype == np.float32
        np.testing.assert_array_equal(np.asarray(wide[name]), expected.astype(np.float32))
    arrays = {"w": RNG.standard_normal((64, 64), np.float32), "norm": RNG.standard_normal(5, np.float32)}
    narrow = load_checkpoint_params(write(tmp_path / "ck", arrays, "float32"), "bfloat16")
    np.testing.assert_array_equal(np.asarray(narrow["w"]), arrays["w"].astype(ml_dtypes.bfloat16))
    np.testing.assert_array_equal(np.asarray(narrow["norm"]), arrays["norm"])


@pytest.mark.parametrize("shape", [(300, 40), (7, 11, 13), (5, 64, 32), (3, 1000)])
@pytest.mark.parametrize("in_flight", [1, 20_000])
def test_parameters_stored_in_pieces_are_joined_again(shape, in_flight, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxserve.weights.checkpoint.PIECE_BYTES", 4096)
    monkeypatch.setattr("jaxserve.weights.checkpoint.CONCURRENT_BYTES", in_flight)
    array = aligned_empty(shape, np.dtype(ml_dtypes.bfloat16))
    array[...] = RNG.standard_normal(shape)
    params = load_checkpoint_params(write(tmp_path / "ck", {"w": array, "b": array[0, :3]}), "bfloat16")
    np.testing.assert_array_equal(np.asarray(params["w"]), array)
    np.testing.assert_array_equal(np.asarray(params["b"]), array[0, :3].astype(params["b"].dtype))


def test_pieces_are_written_from_where_the_parameter_lies(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxserve.weights.checkpoint.PIECE_BYTES", 4096)
    array = aligned_empty((100, 24), np.dtype(ml_dtypes.bfloat16))  # a row is 48 bytes, no multiple of 64
    placed = []

    def device_put(piece: np.ndarray, device: jax.Device) -> jax.Array:
        placed.append((array.ctypes.data <= piece.ctypes.data, piece.ctypes.data % 64, piece.nbytes))
        return real(piece, device)

    real = jax.device_put
    monkeypatch.setattr(jax, "device_put", device_put)
    write(tmp_path / "ck", {"w": array})
    assert placed == [(True, 0, 84 * 48), (True, 0, 16 * 48)]


def test_progress_counts_parameters(written):
    calls = []
    load_checkpoint_params(written, "bfloat16", progress=lambda *a: calls.append(a[1:]))
    assert calls == [(0, 3), (1, 3), (2, 3), (3, 3)]


def test_arrays_larger_than_the_memory_budget_are_written_and_restored(tmp_path, monkeypatch):
    monkeypatch.setattr("jaxserve.weights.checkpoint.CONCURRENT_BYTES", 1)
    params = load_checkpoint_params(write(tmp_path / "ck"), "bfloat16")
    np.testing.assert_array_equal(np.asarray(params["embedding.weight"]), ARRAYS["embedding.weight"])


def all_files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]


def test_a_missing_shortened_or_corrupt_file_is_named(written, copy):
    for path in all_files(written / PARAMS):
        name = path.relative_to(written)
        content = path.read_bytes()
        (copy / name).unlink()
        with pytest.raises(WeightsError, match=f"{name} is missing"):
            read_manifest(copy)
        if not content:
            (copy / name).touch()
            continue
        (copy / name).write_bytes(content[:-1])
        with pytest.raises(WeightsError, match=f"{name} has {len(content) - 1} bytes, {len(content)} are"):
            read_manifest(copy)
        (copy / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        with pytest.raises(WeightsError, match=f"{name} is corrupt"):
            read_manifest(copy)
        (copy / name).write_bytes(content)
    read_manifest(copy)


def test_a_missing_manifest_is_named(copy):
    (copy / MANIFEST).unlink()
    with pytest.raises(WeightsError, match=rf"{MANIFEST}: can't be opened"):
        read_manifest(copy)


def test_the_chat_template_may_be_edited(copy):
    (copy / "chat_template.jinja").write_text("{{ messages }}")
    read_manifest(copy)


def test_a_manifest_cut_off_anywhere_is_an_error(copy):
    text = (copy / MANIFEST).read_text()
    for cut in range(0, len(text) - 2, 7):
        (copy / MANIFEST).write_text(text[:cut])
        with pytest.raises(WeightsError, match=MANIFEST):
            read_manifest(copy)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("format_version", 99, "format_version is 99, this jaxserve reads 1"),
        ("dtype", "int3", "int3"),
        ("dtype", None, "corrupt"),
        ("config", {"family": "llama"}, "corrupt"),
        ("config", 3, "corrupt"),
        ("parameters", ["w"], "corrupt"),
        ("parameters", {"w": ["x"]}, "corrupt"),
        ("parameters", {"w": 3}, "corrupt"),
        ("files", {"params/x": 3}, "corrupt"),
        ("files", {"params/x": [1, 2, 3]}, "corrupt"),
        ("files", {"bad\0name": [3, 4]}, "missing"),
    ],
)
def test_a_manifest_with_a_wrong_value_is_an_error(copy, key, value, message):
    data = json.loads((copy / MANIFEST).read_text())
    (copy / MANIFEST).write_text(json.dumps(data | {key: value}))
    with pytest.raises(WeightsError, match=message):
        read_manifest(copy)


@pytest.mark.parametrize(
    "shapes",
    [
        {"embedding.weight": [300, 41]},
        {"embedding.weight": [300]},
        {"another": [3]},
    ],
)
def test_parameters_that_are_not_what_the_manifest_says_are_an_error(copy, shapes):
    data = json.loads((copy / MANIFEST).read_text())
    data["parameters"] |= shapes
    (copy / MANIFEST).write_text(json.dumps(data))
    with pytest.raises(WeightsError, match=r"convert again"):
        load_checkpoint_params(copy, "bfloat16")


# orbax abandons reads that were under way, which Python reports when it collects them.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_corruption_that_no_checksum_covers_is_an_error_too_where_orbax_sees_it(written, copy):
    manifest = read_manifest(written)
    outcomes = set()
    for path in all_files(written / PARAMS):
        content = path.read_bytes()
        for at in sorted({0, len(content) // 3, len(content) - 1}) if content else []:
            broken = bytearray(content)
            broken[at] ^= 0x55
            (copy / path.relative_to(written)).write_bytes(broken)
            try:
                load_checkpoint_params(copy, "bfloat16", manifest=manifest)
                outcomes.add("loaded")
            except WeightsError:
                outcomes.add("refused")
        (copy / path.relative_to(written)).write_bytes(content)
    assert "refused" in outcomes
    load_checkpoint_params(copy, "bfloat16", manifest=manifest)
