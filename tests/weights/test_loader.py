from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from jaxserve.errors import ConfigError, WeightsError
from jaxserve.models.family import Part, WeightRule, stack_layers
from jaxserve.weights.loader import aligned_empty, load_params
from jaxserve.weights.source import TensorInfo


class ArraySource:
    """A TensorSource over arrays in memory that notes what was read."""

    path = Path("model.test")
    format = "gguf"

    def __init__(self, arrays: dict[str, np.ndarray]):
        self.arrays = arrays
        self.metadata = {}
        self.tensors = {n: TensorInfo(n, a.shape, str(a.dtype), a.nbytes) for n, a in arrays.items()}
        self.reads: list[tuple[str, int]] = []  # name, elements

    def read(self, name: str) -> np.ndarray:
        self.reads.append((name, self.arrays[name].size))
        return self.arrays[name]

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        rows = self.arrays[name][start:stop]
        self.reads.append((name, rows.size))
        return rows

    def close(self) -> None:
        pass


RNG = np.random.default_rng(0)
ARRAYS = {
    "q": RNG.standard_normal((6, 4), np.float32),
    "k": RNG.standard_normal((2, 4)).astype(np.float16),
    "v": RNG.standard_normal((2, 4)).astype(ml_dtypes.bfloat16),
    "norm": RNG.standard_normal(4).astype(ml_dtypes.bfloat16),
    "table": RNG.standard_normal((3, 3), np.float32),
}
RULES = [
    WeightRule(
        "qkv", (10, 4), (Part("q", (6, 4), lambda w: w[::-1]), Part("k", (2, 4)), Part("v", (2, 4)))
    ),
    WeightRule("norm", (4,), (Part("norm", (4,), lambda w: w + np.float32(1)),)),
]
IGNORED = frozenset({"table", "another table"})


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_parts_are_transformed_in_float32_joined_and_cast(dtype):
    params = load_params(ArraySource(ARRAYS), RULES, IGNORED, dtype)
    assert list(params) == ["qkv", "norm"]
    expected = np.concatenate(
        [ARRAYS["q"][::-1], ARRAYS["k"].astype(np.float32), ARRAYS["v"].astype(np.float32)]
    )
    assert params["qkv"].dtype == dtype
    np.testing.assert_array_equal(np.asarray(params["qkv"]), expected.astype(params["qkv"].dtype))


def test_layers_are_stacked_in_order():
    layers = [RNG.standard_normal((4, 3), np.float32) for _ in range(6)]
    source = ArraySource({f"{x}{i}": layers[2 * i + j] for i in range(3) for j, x in enumerate("ab")})
    rule = stack_layers("w", 3, [Part("a{}", (4, 3)), Part("b{}", (4, 3), np.negative)])
    w = np.asarray(load_params(source, [rule], frozenset(), "float32")["w"])
    expected = [np.concatenate([layers[2 * i], -layers[2 * i + 1]]) for i in range(3)]
    np.testing.assert_array_equal(w, np.stack(expected))


def test_norms_of_all_layers_stay_float32():
    source = ArraySource({f"norm{i}": np.full(4, 1 / 3, np.float32) for i in range(3)})
    rule = stack_layers("layers.mlp_norm.weight", 3, [Part("norm{}", (4,))])
    norm = load_params(source, [rule], frozenset(), "bfloat16")["layers.mlp_norm.weight"]
    np.testing.assert_array_equal(np.asarray(norm), np.full((3, 4), 1 / 3, np.float32))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_vectors_stay_float32(dtype):
    norm = load_params(ArraySource(ARRAYS), RULES, IGNORED, dtype)["norm"]
    assert norm.dtype == np.float32
    np.testing.assert_array_equal(np.asarray(norm), ARRAYS["norm"].astype(np.float32) + 1)


def test_casting_rounds_to_nearest_even():
    values = np.array([[1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20]], np.float32)
    rules = [WeightRule("w", (1, 3), (Part("w", (1, 3)),))]
    params = load_params(ArraySource({"w": values}), rules, frozenset(), "bfloat16")
    assert np.asarray(params["w"]).astype(float).tolist() == [[1, 1 + 2**-6, 1 + 2**-7]]


def test_large_tensors_are_read_in_blocks_of_rows(monkeypatch):
    monkeypatch.setattr("jaxserve.weights.loader.BLOCK_ELEMENTS", 10)
    source = ArraySource({"w": np.arange(28, dtype=np.float32).reshape(7, 4)})
    rules = [WeightRule("w", (7, 4), (Part("w", (7, 4)),))]
    params = load_params(source, rules, frozenset(), "float32")
    assert [n for _, n in source.reads] == [8, 8, 8, 4]
    np.testing.assert_array_equal(np.asarray(params["w"]), source.arrays["w"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": None}, r"model\.test: 1 tensor missing: 'k'; .*expected with the shape \[2, 4\] .* qkv"),
        ({"k": np.zeros((4, 2))}, r"'k': expected \[2, 4\] for parameter qkv, found \[4, 2\]"),
        ({"norm": np.zeros((4, 1))}, r"'norm': expected \[4\] for parameter norm, found \[4, 1\]"),
        ({"more": np.zeros(3)}, r"1 tensor not part of this model: 'more'; the first has the shape \[3\]"),
        ({str(i): np.zeros(3) for i in range(9)}, r"9 tensors not part .*'0'.*'4' and 4 more"),
    ],
)
def test_missing_extra_and_wrongly_shaped_tensors_are_named_before_anything_is_read(change, message):
    source = ArraySource({n: a for n, a in (ARRAYS | change).items() if a is not None})
    with pytest.raises(WeightsError, match=message):
        load_params(source, RULES, IGNORED, "bfloat16")
    assert source.reads == []


def test_ignored_tensors_may_be_absent_and_are_never_read():
    source = ArraySource(ARRAYS)
    load_params(source, RULES, IGNORED, "bfloat16")
    assert "table" not in dict(source.reads)


def test_a_dtype_that_is_not_served_is_an_error_with_the_choice():
    with pytest.raises(ConfigError, match=r"'float16' is not supported: one of bfloat16, float32"):
        load_params(ArraySource(ARRAYS), RULES, IGNORED, "float16")


def test_progress_rises_to_the_total():
    calls = []
    load_params(ArraySource(ARRAYS), RULES, IGNORED, "bfloat16", progress=lambda *a: calls.append(a))
    assert [c[1:] for c in calls] == [(0, 4), (1, 4), (2, 4), (3, 4), (4, 4)]


def test_place_decides_where_a_parameter_goes():
    placed = []

    def place(array: np.ndarray) -> jax.Array:
        placed.append(array.shape)
        return jax.device_put(array)

    load_params(ArraySource(ARRAYS), RULES, IGNORED, "bfloat16", place=place)
    assert placed == [(10, 4), (4,)]


def test_the_cpu_takes_over_a_loaded_array_without_a_copy():
    array = aligned_empty((1000, 333), np.dtype(ml_dtypes.bfloat16))
    assert jax.device_put(array, jax.devices("cpu")[0]).unsafe_buffer_pointer() == array.ctypes.data


MEMORY = """
import jax, numpy as np
from pathlib import Path
from jaxserve.models.family import Part, WeightRule
from jaxserve.weights.loader import load_params
from jaxserve.weights.source import TensorInfo

def memory(key):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(key))
    return int(line.split()[1]) << 10

class Source:
    path, format, metadata = Path("m"), "gguf", {}
    def __init__(self, shapes):
        self.tensors = {n: TensorInfo(n, s, "F32", 4 * s[0] * s[1]) for n, s in shapes.items()}
    def read(self, name):
        return self.read_rows(name, 0, self.tensors[name].shape[0])
    def read_rows(self, name, start, stop):
        return np.full((stop - start, self.tensors[name].shape[1]), 2.0, np.float32)

def rule(i):
    plus_one = (lambda w: w + 1) if i % 2 else None
    parts = tuple(Part(f"w{j}", (rows, cols), plus_one) for j in (2 * i, 2 * i + 1))
    return WeightRule(f"p{i}", (2 * rows, cols), parts)

rows, cols, n = 2048, 1024, 24  # 4 MiB each in bfloat16, 8 MiB as float32
large = (16 * rows, cols)  # 128 MiB as float32
shapes = {f"w{i}": (rows, cols) for i in range(n)} | {"embedding": large}
rules = [rule(i) for i in range(n // 2)] + [WeightRule("embedding", large, (Part("embedding", large),))]
jax.device_put(np.zeros(1)).block_until_ready()
before = memory("VmRSS")
params = load_params(Source(shapes), rules, frozenset(), "bfloat16")
jax.block_until_ready(params)
result, peak = sum(p.nbytes for p in params.values()), memory("VmHWM") - before
assert float(params["p1"][-1, -1]) == 3 and float(params["embedding"][-1, -1]) == 2
print(result, peak)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_is_the_result_and_about_one_tensor():
    out = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True)
    result, peak = map(int, out.stdout.split())
    assert result == 160 << 20
    # A tensor in float32, its transformed copy and a block; the embedding alone is 128 MiB in float32.
    assert peak - result < 24 << 20


@pytest.mark.parametrize("by_row", [True, False])
def test_a_part_may_change_its_shape_and_is_read_by_rows_where_that_is_all_the_same(by_row):
    wide = np.arange(3 * 8 * 2**18, dtype=np.float32).reshape(3, 8, 2**18)  # 2 blocks' worth a row
    source = ArraySource({"a": wide, "b": wide + 1})
    parts = [Part(n, wide.shape, lambda w: w[:, ::2, 0], made=(3, 4), by_row=by_row) for n in "ab"]
    params = load_params(source, [WeightRule("x.weight", (6, 4), tuple(parts))], frozenset(), "float32")
    np.testing.assert_array_equal(params["x.weight"], np.concatenate([wide[:, ::2, 0], wide[:, ::2, 0] + 1]))
    assert {elements for _, elements in source.reads} == {wide[0].size if by_row else wide.size}
