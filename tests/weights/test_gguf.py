from __future__ import annotations

import contextlib
import struct
import time
import tracemalloc
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jaxserve.errors import WeightsError
from jaxserve.weights.gguf import GGUFSource
from jaxserve.weights.gguf_header import read_header

DEQUANTISABLE = sorted(
    q for q in Q if q not in (Q.F32, Q.F16, Q.BF16) and q in gguf.quants._type_traits
)


def read_everything(path: Path) -> None:
    source = GGUFSource(path)
    dict(source.metadata)
    for name in source.tensors:
        source.read(name)
    source.close()


def header(*, tensors: int = 0, pairs: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs)


def string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def tensor(name: str, dims: list[int], kind: int, offset: int = 0) -> bytes:
    return string(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, offset)


@pytest.mark.parametrize("qtype", DEQUANTISABLE, ids=lambda q: q.name)
def test_every_type_the_gguf_package_can_dequantise_reads_as_it_says(qtype: Q, tmp_path: Path):
    block, block_bytes = gguf.GGML_QUANT_SIZES[qtype]
    rng = np.random.default_rng(int(qtype))
    raw = rng.integers(0, 256, (37, 5 * block_bytes), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("w", raw, raw_dtype=qtype)
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    with np.errstate(all="ignore"):
        expected = gguf.quants.dequantize(raw, qtype)
    source = GGUFSource(tmp_path / "m.gguf")
    assert source.tensors["w"].shape == (37, 5 * block)
    assert source.tensors["w"].dtype == qtype.name
    assert source.tensors["w"].nbytes == raw.nbytes
    np.testing.assert_array_equal(source.read("w"), expected)
    np.testing.assert_array_equal(source.read_rows("w", 7, 30), expected[7:30])


def test_a_tensor_of_many_blocks_is_the_same_as_in_one_piece(make_gguf, tmp_path, monkeypatch):
    monkeypatch.setattr("jaxserve.weights.gguf.BLOCK_ELEMENTS", 4096 * 2)
    values = np.random.default_rng(0).standard_normal((333, 96), np.float32)
    source = GGUFSource(make_gguf(tmp_path / "m.gguf", {"w": (values, Q.Q4_1)}))
    expected = gguf.quants.dequantize(gguf.quants.quantize(values, Q.Q4_1), Q.Q4_1)
    np.testing.assert_array_equal(source.read("w"), expected)


def test_unquantised_tensors_keep_their_type(make_gguf, tmp_path):
    values = np.random.default_rng(1).standard_normal((6, 32), np.float32)
    source = GGUFSource(
        make_gguf(tmp_path / "m.gguf", {q.name: (values, q) for q in (Q.F32, Q.F16, Q.BF16)})
    )
    for name, dtype in (("F32", np.float32), ("F16", np.float16), ("BF16", ml_dtypes.bfloat16)):
        assert source.read(name).dtype == dtype
        np.testing.assert_array_equal(source.read(name), values.astype(dtype))
        np.testing.assert_array_equal(source.read_rows(name, 2, 5), values[2:5].astype(dtype))


def test_elements_of_a_quantised_vector_can_be_read_in_part(make_gguf, tmp_path):
    values = np.arange(96, dtype=np.float32)
    source = GGUFSource(make_gguf(tmp_path / "m.gguf", {"w": (values, Q.Q8_0)}))
    np.testing.assert_array_equal(source.read_rows("w", 30, 70), source.read("w")[30:70])


def test_metadata_are_the_plain_values_that_were_written(make_gguf, tmp_path):
    pairs = {
        "a.string": "grüße 🙂", "a.bool": True, "an.int": 7, "a.float": 0.5, "tokens": ["a", "", "é"],
        "ints": [1, -2, 3], "floats": [0.5, 1.5], "bools": [True, False],
    }  # fmt: skip
    source = GGUFSource(make_gguf(tmp_path / "m.gguf", {}, pairs))
    assert {k: source.metadata[k] for k in pairs} == pairs
    assert source.metadata["general.architecture"] == "llama"
    assert "nothing" not in source.metadata
    for key, value in pairs.items():
        assert type(source.metadata[key]) is type(value)
    assert type(source.metadata["ints"][0]) is int


def test_our_header_agrees_with_the_gguf_packages_reader(tiny_gguf):
    source, reader = GGUFSource(tiny_gguf), gguf.GGUFReader(tiny_gguf)
    fields = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    assert dict(source.metadata) == fields
    assert list(source.tensors) == [t.name for t in reader.tensors]
    for t in reader.tensors:
        expected = gguf.quants.dequantize(t.data, t.tensor_type)
        np.testing.assert_array_equal(source.read(t.name).astype(np.float32), expected)


def test_a_file_cut_off_anywhere_is_an_error(tiny_gguf, tmp_path):
    whole = tiny_gguf.read_bytes()
    entries = read_header(tiny_gguf).entries.values()
    start = min(e.offset for e in entries)
    last = max(e.offset + e.info.nbytes for e in entries)
    path = tmp_path / "cut.gguf"
    cuts = [*range(0, 400), *range(400, start, 37), *range(start, last, 4999), last - 1]
    for cut in cuts:
        path.write_bytes(whole[:cut])
        with pytest.raises(WeightsError, match=r"truncated|no GGUF file"):
            GGUFSource(path)
    path.write_bytes(whole[:last])
    read_everything(path)


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_corrupt_bytes_give_an_error_or_a_model_never_a_traceback(data, make_gguf, tmp_path):
    path = tmp_path / "small.gguf"
    if not path.exists():
        values = np.ones((2, 32), np.float32)
        tensors = {"w": (values, Q.Q8_0), "v": (values, Q.F16)}
        make_gguf(path, tensors, {"tokens": ["aa", "b"], "scores": [1.0], "n": 3, "s": "x"})
    broken = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 3))):
        broken[data.draw(st.integers(0, len(broken) - 1))] = data.draw(st.integers(0, 255))
    (tmp_path / "broken.gguf").write_bytes(broken)
    with contextlib.suppress(WeightsError):
        read_everything(tmp_path / "broken.gguf")


W = tensor("w", [4], 0)
BROKEN = {
    "an empty file": (b"", "no GGUF file"),
    "another format": (b"PK\x03\x04" + bytes(64), "no GGUF file"),
    "an old version": (header(version=1), "version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "big-endian"),
    "absurdly many tensors": (header(tensors=2**60) + bytes(64), "number of tensors is 1152921504606846976"),
    "absurdly many pairs": (header(pairs=2**63) + bytes(64), "number of key-value pairs"),
    "an absurdly long string": (header(pairs=1) + string("k") + struct.pack("<IQ", 8, 2**62), "truncated"),
    "an absurdly long array": (
        header(pairs=1) + string("k") + struct.pack("<IIQ", 9, 4, 2**61) + bytes(64), "the length of k",
    ),
    "an absurdly long array of strings": (
        header(pairs=1) + string("k") + struct.pack("<IIQ", 9, 8, 2**40) + bytes(64), "the length of k",
    ),
    "an array of strings that is cut": (
        header(pairs=1) + string("k") + struct.pack("<IIQQ", 9, 8, 2, 2**50) + bytes(64), "truncated",
    ),
    "an array of strings with an absurd one": (
        header(pairs=1) + string("k") + struct.pack("<IIQQ", 9, 8, 2, 2**63) + bytes(64), "truncated",
    ),
    "arrays nested deeply": (
        header(pairs=1) + string("k") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 50, "nests",
    ),
    "a key twice": (header(pairs=2) + (string("k") + struct.pack("<II", 4, 1)) * 2, "'k' occurs twice"),
    "an unknown value type": (header(pairs=1) + string("k") + struct.pack("<II", 99, 1), "value type 99"),
    "a bad alignment": (
        header(pairs=1) + string("general.alignment") + struct.pack("<II", 4, 3), "general.alignment is 3",
    ),
    "a tensor twice": (header(tensors=2) + W * 2 + bytes(64), "'w' occurs twice"),
    "an unknown tensor type": (header(tensors=1) + tensor("w", [4], 250) + bytes(64), "type 250"),
    "five dimensions": (header(tensors=1) + tensor("w", [1] * 5, 0) + bytes(64), "5 dimensions"),
    "an empty tensor": (header(tensors=1) + tensor("w", [0, 2**60], 0) + bytes(64), r"shape \[1152"),
    "a row that is no whole block": (header(tensors=1) + tensor("w", [33], 8) + bytes(64), "multiple of 32"),
    "an absurd shape": (header(tensors=1) + tensor("w", [2**62, 2**62], 0) + bytes(64), "truncated"),
    "an absurd offset": (header(tensors=1) + tensor("w", [4], 0, 2**63) + bytes(64), "truncated"),
    "a name that is no text": (
        header(tensors=1) + struct.pack("<Q", 2) + b"\xff\xff" + W[9:] + bytes(64), "not UTF-8",
    ),
    "a type without a dequantiser": (
        header(tensors=1) + tensor("w", [4], int(Q.I32)) + bytes(64), "'w' is I32",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_a_clear_error_at_no_cost(case: str, tmp_path):
    content, message = BROKEN[case]
    (tmp_path / "m.gguf").write_bytes(content)
    tracemalloc.start()
    with pytest.raises(WeightsError, match=message):
        read_everything(tmp_path / "m.gguf")
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


def test_a_missing_file_is_an_error_that_names_it(tmp_path):
    with pytest.raises(WeightsError, match=r"none\.gguf.*No such file"):
        GGUFSource(tmp_path / "none.gguf")


def test_a_file_shortened_while_open_is_an_error(tiny_gguf, tmp_path):
    path = tmp_path / "m.gguf"
    path.write_bytes(tiny_gguf.read_bytes())
    source = GGUFSource(path)
    with open(path, "r+b") as file:
        file.truncate(5000)
    with pytest.raises(WeightsError, match="truncated while it was being read"):
        source.read("blk.1.ffn_up.weight")


def test_a_closed_source_says_so(tiny_gguf):
    source = GGUFSource(tiny_gguf)
    source.close()
    source.close()
    with pytest.raises(WeightsError, match="closed"):
        source.read("token_embd.weight")


def test_opening_a_file_with_262k_tokens_is_fast(gemma3_gguf):
    begin = time.perf_counter()
    source = GGUFSource(gemma3_gguf)
    assert time.perf_counter() - begin < 2
    tokens = source.metadata["tokenizer.ggml.tokens"]
    assert time.perf_counter() - begin < 4
    assert (len(tokens), tokens[2]) == (262144, "<bos>")
    assert tokens is source.metadata["tokenizer.ggml.tokens"]
