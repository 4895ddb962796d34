"""The dense layer against float64 NumPy: values, the bits of a row, and the ways JAX calls it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import native

BF16, F32 = jnp.bfloat16, jnp.float32
# One group, tails of K, a tail of output channels, more than one block of K.
SHAPES = [(1, 1), (3, 8), (37, 88), (64, 256), (19, 77), (40, 2048 + 48), (29, 4096 + 5)]
# Both sides of every switch: one row, row tiles of each size, the change of kernel, several passes.
ROWS = [1, 2, 3, 4, 5, 7, 8, 13, 16, 17, 32, 519]


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), dtype)


def dense(x: jax.Array, w: jax.Array) -> np.ndarray:
    return np.asarray(x).astype(np.float64) @ np.asarray(w).astype(np.float64).T


@pytest.mark.parametrize("w_dtype", [BF16, F32])
@pytest.mark.parametrize("x_dtype", [BF16, F32])
@pytest.mark.parametrize(("channels", "k"), SHAPES)
def test_a_dense_layer_equals_the_float64_product_to_float32_accuracy(isa, channels, k, x_dtype, w_dtype):
    rng = np.random.default_rng([channels, k])
    x, w = normal(rng, (ROWS[-1], k), x_dtype), normal(rng, (channels, k), w_dtype)
    scale = np.abs(np.asarray(x, np.float64)) @ np.abs(np.asarray(w, np.float64)).T
    for rows in (1, 6, 16, 17, ROWS[-1]):
        got = np.asarray(native.linear(x[:rows], w, out_dtype=F32), np.float64)
        assert np.all(np.abs(got - dense(x[:rows], w)) <= 2e-6 * scale[:rows])


@pytest.mark.parametrize("w_dtype", [BF16, F32])
@pytest.mark.parametrize(("channels", "k"), [(37, 88), (19, 77), (40, 2048 + 48), (100, 576)])
def test_the_bits_of_a_row_do_not_depend_on_the_other_rows(isa, channels, k, w_dtype):
    rng = np.random.default_rng(7)
    x, w = normal(rng, (ROWS[-1], k), BF16), normal(rng, (channels, k), w_dtype)
    together = np.asarray(native.linear(x, w, out_dtype=F32))
    for rows in ROWS:
        first = int(rng.integers(0, len(x) - rows + 1))
        some = np.asarray(native.linear(x[first : first + rows], w, out_dtype=F32))
        np.testing.assert_array_equal(some, together[first : first + rows])


def test_the_result_is_the_float32_sum_rounded_once_to_the_dtype_of_x(isa):
    rng = np.random.default_rng(3)
    x, w = normal(rng, (6, 96), BF16), normal(rng, (33, 96), BF16)
    exact = native.linear(x, w, out_dtype=F32)
    assert native.linear(x, w).dtype == BF16
    np.testing.assert_array_equal(native.linear(x, w), exact.astype(BF16))
    assert native.linear(x.astype(F32), w).dtype == F32


@pytest.mark.parametrize("rows", [1, 8, 20])
def test_values_that_are_not_finite_stay_in_their_row_and_channel(isa, rows):
    x, w = np.ones((rows, 77), np.float32), np.ones((33, 77), np.float32)
    x[0, 76], w[4, 76] = np.nan, np.inf
    got = np.asarray(native.linear(jnp.asarray(x), jnp.asarray(w, BF16)))
    assert np.isnan(got[0]).all()
    assert np.isposinf(got[1:, 4]).all()
    assert np.isfinite(np.delete(got[1:], 4, axis=1)).all()


def test_bfloat16_results_round_infinities_nans_and_ties_like_jax(isa):
    values = np.array([1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, np.inf, -np.inf, np.nan, -0.0, 1e-40], np.float32)
    got = native.linear(jnp.asarray(values[:, None]), jnp.ones((1, 1), F32), out_dtype=BF16)[:, 0]
    want = jnp.asarray(values, F32).astype(BF16)
    np.testing.assert_array_equal(np.asarray(got, np.float32)[:-2], np.asarray(want, np.float32)[:-2])


def test_a_dense_layer_runs_in_a_loop_inside_a_compiled_function_with_a_donated_argument(built):
    rng = np.random.default_rng(5)
    x, w = normal(rng, (5, 64), F32), normal(rng, (64, 64), BF16) / 8

    def repeated(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3, lambda _, y: native.linear(y, w), x)

    want = dense(jnp.asarray(dense(jnp.asarray(dense(x, w), F32), w), F32), w)
    compiled = jax.jit(repeated, donate_argnums=0).lower(x, w).compile()
    np.testing.assert_allclose(compiled(x, w), want, rtol=1e-4, atol=1e-4)
    assert x.is_deleted()


def test_a_large_dense_layer_that_uses_all_threads_equals_the_product(isa):
    rng = np.random.default_rng(11)
    w = normal(rng, (1500, 640), BF16)
    for rows in (1, 4, 70):
        x = normal(rng, (rows, 640), BF16)
        got = np.asarray(native.linear(x, w, out_dtype=F32))
        np.testing.assert_allclose(got, dense(x, w), rtol=0, atol=1e-3)


def test_leading_axes_of_x_are_kept(built):
    rng = np.random.default_rng(2)
    x, w = normal(rng, (2, 3, 32), F32), normal(rng, (8, 32), BF16)
    flat = native.linear(x.reshape(6, 32), w)
    np.testing.assert_array_equal(native.linear(x, w), flat.reshape(2, 3, 8))


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        (jnp.ones((2, 8)), jnp.ones((4, 9)), r"\(2, 8\) and w \(4, 9\)"),
        (jnp.ones((2, 8)), jnp.ones((4, 8), jnp.int8), "w is int8, must be bfloat16 or float32"),
        (jnp.ones((2, 8), jnp.float16), jnp.ones((4, 8)), "x is float16"),
    ],
)
def test_shapes_and_dtypes_that_do_not_fit_are_named(built, x, w, message):
    with pytest.raises(ValueError, match=message):
        native.linear(x, w)
