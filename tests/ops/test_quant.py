"""int8 matrices: what quantising costs, and products with them against float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from jaxserve.errors import ConfigError
from jaxserve.ops import linear, quant
from jaxserve.ops.quant import GROUPS, Int8, dequantise, quantise

WEIGHTS = arrays(
    np.float32, st.tuples(st.integers(1, 3), st.integers(1, 5), st.sampled_from([32, 64, 96])),
    elements=st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False) | st.floats(-1, 1, width=32),
)  # fmt: skip


def as_float64(weight: Int8) -> np.ndarray:
    scales = np.asarray(weight.scales, np.float64)
    values = np.asarray(weight.values, np.float64)
    return values * np.repeat(scales, values.shape[-1] // scales.shape[-1], axis=-1)


def absmax(weights: np.ndarray, group: int) -> np.ndarray:
    return np.abs(weights).reshape(*weights.shape[:-1], -1, group).max(axis=-1) / np.float32(127)


def squared_errors(weights: np.ndarray, scales: np.ndarray, back: np.ndarray) -> np.ndarray:
    return ((back - weights) ** 2).reshape(*scales.shape, -1).sum(axis=-1)


@given(WEIGHTS, st.sampled_from(list(GROUPS)))
def test_a_weight_is_off_by_half_a_step_and_a_step_is_at_least_a_127th_of_its_groups_largest(
    weights, quantization
):
    int8 = quantise(weights, quantization)
    group = GROUPS[quantization] or weights.shape[-1]
    plain = absmax(weights, group)
    assert (int8.scales >= plain * (1 - 2e-6)).all()
    tiny = 127 * np.finfo(np.float32).tiny  # below, steps are not exact, or flushed to 0
    steps = np.repeat(int8.scales, group, axis=-1).astype(np.float64)
    assert (np.abs(as_float64(int8) - weights) <= steps / 2 * (1 + 1e-3) + tiny).all()
    assert np.abs(int8.values.astype(int)).max(initial=0) <= 127
    back = np.asarray(dequantise(int8), np.float64)
    np.testing.assert_allclose(back, as_float64(int8), rtol=2**-23, atol=tiny)


def test_weights_of_no_lattice_keep_the_scale_of_their_largest():
    weights = np.random.default_rng(0).standard_normal((64, 256), np.float32)
    np.testing.assert_array_equal(quantise(weights, "int8-channel").scales, absmax(weights, 256))
    int8, plain = quantise(weights, "int8"), absmax(weights, 32)
    steps = np.repeat(plain, 32, axis=-1).astype(np.float64)
    rounded = np.rint(weights / steps) * steps
    found, wanted = (squared_errors(weights, plain, back) for back in (as_float64(int8), rounded))
    assert (found <= wanted * (1 + 1e-4)).all()


@pytest.mark.parametrize("zero", [0.0, 8.0, None], ids=["least is 0", "4-bit about 8", "any least"])
def test_weights_of_four_bits_are_nearly_exact(zero):
    """GGUF's Q4_0 and Q4_1 are of this form: step * q + least, in float32 from halves."""
    rng = np.random.default_rng(1)
    step = rng.uniform(0.01, 0.02, (500, 1)).astype(np.float16).astype(np.float32)
    offset = rng.uniform(6, 9, (500, 1)) if zero is None else zero
    least = (-step * offset).astype(np.float16 if zero is None else np.float32).astype(np.float32)
    codes = rng.integers(0, 16, (500, 32))
    codes[:, :2] = 0, 15
    weights = np.float32(step * codes.astype(np.float32) + least)
    int8 = quantise(weights, "int8")
    plain = absmax(weights, 32)
    steps = plain.astype(np.float64)
    rounded = np.rint(weights / steps) * steps
    found, wanted = (squared_errors(weights, plain, back) for back in (as_float64(int8), rounded))
    assert (found <= wanted * (1 + 1e-4)).all()
    assert found.sum() < wanted.sum() * (0.3 if zero is None else 1e-8)


def test_halves_go_to_the_even_step_and_ends_of_a_group_are_its_own():
    weights = np.zeros((1, 64), np.float32)
    weights[0, :4], weights[0, 32] = [127, 0.5, 1.5, -2.5], 1e-3
    int8 = quantise(weights, "int8")
    assert int8.values[0, :4].tolist() == [127, 0, 2, -2]
    assert int8.values[0, 32] == 127
    np.testing.assert_array_equal(int8.scales, np.float32([[1, 1e-3]]) / np.float32([[1, 127]]))


def test_a_weight_that_is_not_finite_makes_its_group_nan_and_no_other():
    weights = np.ones((2, 64), np.float32)
    weights[0, 3], weights[1, 40] = np.nan, np.inf
    back = np.asarray(dequantise(quantise(weights, "int8")))
    assert np.isnan(back[0, 3])
    assert np.isnan(back[1, 40])
    np.testing.assert_array_equal(back[0, 32:], 1)
    np.testing.assert_array_equal(back[1, :32], 1)


def test_large_matrices_are_taken_in_blocks_with_the_same_result(monkeypatch):
    weights = np.random.default_rng(0).standard_normal((3, 7, 64), np.float32)
    whole = quantise(weights, "int8")
    monkeypatch.setattr(quant, "BLOCK_ELEMENTS", 128)
    for one, other in zip(quantise(weights, "int8"), whole):
        np.testing.assert_array_equal(one, other)


def test_rows_that_are_no_whole_groups_are_an_error_that_says_what_to_use():
    with pytest.raises(ConfigError, match=r"quantization=int8: mlp\.weight has rows of 40 .* int8-channel"):
        quantise(np.ones((2, 40), np.float32), "int8", "mlp.weight")
    assert quantise(np.ones((2, 40), np.float32), "int8-channel").scales.shape == (2, 1)


@pytest.mark.parametrize("layer", [None, 2])
@pytest.mark.parametrize("shape", [(1, 64), (2, 3, 64), (64,)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("quantization", GROUPS)
def test_a_dense_layer_of_int8_weights_equals_float64(backend, quantization, dtype, shape, layer):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal(shape), dtype)
    weights = rng.standard_normal((48, 64) if layer is None else (3, 48, 64), np.float32)
    int8 = jax.tree.map(jnp.asarray, quantise(weights, quantization))
    prepared = backend.prepare("lm_head.weight" if layer is None else "layers.mlp.down.weight", int8)
    assert prepared.is_packed == (backend.linear_name == "native")
    index = None if layer is None else jnp.int32(layer)
    out = jax.jit(backend.linear, static_argnames="out_dtype")(x, prepared, index, out_dtype=jnp.float32)
    matrix = as_float64(int8) if layer is None else as_float64(int8)[layer]
    check(out, x, matrix, dtype)


def check(out: jax.Array, x: jax.Array, matrix: np.ndarray, dtype: jnp.dtype) -> None:
    wanted = np.asarray(x, np.float64) @ matrix.T
    # Nothing is coarser than a weight that is rounded to bfloat16; with float32 rows it is 16 bits of a row.
    terms = np.abs(np.asarray(x, np.float64)) @ np.abs(matrix.T)
    assert (np.abs(np.asarray(out) - wanted) <= terms * (2**-9 if dtype == jnp.bfloat16 else 2**-15)).all()


def test_weights_that_the_kernels_do_not_pack_are_multiplied_by_xla(backend):
    rng = np.random.default_rng(0)
    x, weights = jnp.ones((3, 40), jnp.float32), rng.standard_normal((2, 12, 40), np.float32)
    int8 = jax.tree.map(jnp.asarray, quantise(weights, "int8-channel"))
    prepared = backend.prepare("layers.mlp.down.weight", int8)
    assert not prepared.is_packed
    check(backend.linear(x, prepared, jnp.int32(1)), x, as_float64(int8)[1], jnp.float32)
    np.testing.assert_array_equal(
        backend.rows(Int8(prepared.values[0], prepared.scales[0]), jnp.array([[3], [0]]), 40)[:, 0],
        np.asarray(dequantise(int8))[0, [3, 0]],
    )


def test_the_form_for_tpu_is_the_same_product():
    """Run on a CPU, which lacks it: it is chosen where a program is lowered for TPU."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((3, 96)), jnp.bfloat16)
    int8 = jax.tree.map(jnp.asarray, quantise(rng.standard_normal((20, 96), np.float32), "int8"))
    check(linear._groups_by_a_product(x, int8), x, as_float64(int8), jnp.bfloat16)


@pytest.mark.parametrize("quantization", GROUPS)
def test_rows_of_an_embedding_are_the_quantised_ones(backend, quantization):
    weights = np.random.default_rng(0).standard_normal((48, 64), np.float32)
    int8 = jax.tree.map(jnp.asarray, quantise(weights, quantization))
    table = backend.prepare("embedding.weight", int8)
    numbers = np.array([[0, 47, 3], [17, 17, 31]])
    rows = jax.jit(backend.rows, static_argnums=2)(table, numbers, 64)
    np.testing.assert_array_equal(rows, np.asarray(dequantise(int8))[numbers])
