"""Packed weights: float32 with the row-major kernel's bits, bfloat16 in fixed point near float64's result."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import native
from jaxserve.native.library import load

BF16, F32 = jnp.bfloat16, jnp.float32
# One panel and one group, several, more than one block of K with a short last one.
SHAPES = [(16, 16), (48, 80), (160, 576), (32, 2048 + 48)]
# Row tiles of every size, both sides of the change of kernel, several passes.
ROWS = [*range(1, 41), 128, 300, 519]
FEW_ROWS = [1, 2, 3, 4, 5, 8, 9, 12, 33, 519]


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return jnp.asarray(rng.standard_normal(shape), dtype)


def bits(x: jax.Array) -> np.ndarray:
    return np.asarray(x).view(np.uint16 if x.dtype == BF16 else np.uint32)


@pytest.mark.parametrize("x_dtype", [BF16, F32])
@pytest.mark.parametrize(("channels", "k"), SHAPES)
def test_packed_float32_gives_the_bits_of_row_major_weights_for_any_number_of_rows(isa, channels, k, x_dtype):
    rng = np.random.default_rng([channels, k])
    x, w = normal(rng, (ROWS[-1], k), x_dtype), normal(rng, (2, channels, k), F32)
    packed = native.pack(w)
    wanted = bits(native.linear(x, w[1], out_dtype=F32))
    for rows in FEW_ROWS:
        first = int(rng.integers(0, len(x) - rows + 1))
        some = native.linear_packed(x[first : first + rows], packed, jnp.int32(1), out_dtype=F32)
        np.testing.assert_array_equal(bits(some), wanted[first : first + rows])


def in_fixed_point(x: np.ndarray, w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """x @ w^T in float64 of the numbers that the kernel multiplies, and the most they may be off in all."""

    def fixed(values: np.ndarray, limit: int) -> tuple[np.ndarray, np.ndarray]:
        unit = np.abs(values).max(axis=-1, keepdims=True) / limit
        return np.rint(values / np.where(unit == 0, 1, unit)) * unit, unit

    groups = [fixed(x[:, i : i + 64], 4095) for i in range(0, x.shape[1], 64)]
    rounded = np.concatenate([group for group, _ in groups], axis=1)
    half_units = np.concatenate([np.broadcast_to(u / 2, g.shape) for g, u in groups], axis=1)
    weights, unit = fixed(w, 8191)
    slack = half_units @ np.abs(weights).T + np.abs(rounded) @ np.broadcast_to(unit / 2, w.shape).T
    return rounded @ weights.T, slack


@pytest.mark.parametrize("x_dtype", [BF16, F32])
@pytest.mark.parametrize(("channels", "k"), SHAPES)
def test_packed_bfloat16_is_multiplied_in_fixed_point_or_exactly(isa, channels, k, x_dtype):
    rng = np.random.default_rng([channels, k])
    x, w = normal(rng, (40, k), x_dtype), normal(rng, (2, channels, k), BF16)
    x = x.at[3].multiply(1000).at[5, :16].multiply(1e6).at[7].set(0)
    x64, w64 = np.asarray(x, np.float64), np.asarray(w[1], np.float64)
    got = np.asarray(native.linear_packed(x, native.pack(w), jnp.int32(1), out_dtype=F32), np.float64)
    fixed, slack = in_fixed_point(x64, w64)
    # Where an element lies half between two numbers, the kernel's float32 scale may round it the other way.
    size = np.abs(x64) @ np.abs(w64).T
    assert np.all(np.abs(got - x64 @ w64.T) <= slack * 1.01 + 1e-5 * size)
    if load().keeps_bfloat16():  # products are exact, sums in float32, float32 x in two terms
        terms = 2.0**-16 if x_dtype == F32 else 0.0
        assert np.all(np.abs(got - x64 @ w64.T) <= (terms + 2.0**-24 * (k / 2 + 2)) * size)
        return
    ordinary = [row for row in range(40) if row not in (3, 5, 7)]
    off = np.abs(got - x64 @ w64.T)[ordinary].max() / np.abs(x64 @ w64.T)[ordinary].max()
    assert off < 1e-3  # bfloat16 rounds results of this size by up to 2e-3
    assert np.abs(got - fixed)[ordinary].max() <= 1e-4 * np.abs(fixed)[ordinary].max() + slack.max() / 50


@pytest.mark.parametrize(("channels", "k"), SHAPES)
def test_a_row_has_the_same_bits_among_any_number_of_rows(isa, channels, k):
    rng = np.random.default_rng([channels, k])
    x, packed = normal(rng, (ROWS[-1], k), BF16), native.pack(normal(rng, (2, channels, k), BF16))
    wanted = bits(native.linear_packed(x, packed, jnp.int32(1), out_dtype=F32))
    for rows in ROWS if channels == 160 else FEW_ROWS:
        first = int(rng.integers(0, len(x) - rows + 1))
        some = native.linear_packed(x[first : first + rows], packed, jnp.int32(1), out_dtype=F32)
        np.testing.assert_array_equal(bits(some), wanted[first : first + rows])


@pytest.mark.parametrize("rows", [1, 7, 30])
def test_the_result_is_rounded_to_the_dtype_of_x_as_jax_rounds(isa, rows):
    rng = np.random.default_rng(rows)
    x, w = normal(rng, (rows, 64), BF16), normal(rng, (1, 48, 64), BF16)
    packed, layer = native.pack(w), jnp.int32(0)
    exact = native.linear_packed(x, packed, layer, out_dtype=F32)
    rounded = native.linear_packed(x, packed, layer)
    np.testing.assert_array_equal(bits(rounded), bits(exact.astype(BF16)))


def test_infinities_nans_and_ties_round_like_jax_in_every_channel(isa):
    special = [1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, np.inf, -np.inf, np.nan, -0.0, 1e-40, -1e-45, 2.0, 0.1]
    values = np.resize(np.array(special, np.float32), 32)
    w = np.zeros((1, 32, 16), np.float32)
    w[0, :, 0] = values
    x = np.zeros((3, 16), np.float32)
    x[:, 0] = 1.0
    packed = native.pack(jnp.asarray(w))
    got = native.linear_packed(jnp.asarray(x), packed, jnp.int32(0), out_dtype=BF16)
    want = native.linear_packed(jnp.asarray(x), packed, jnp.int32(0), out_dtype=F32).astype(BF16)
    for row in np.asarray(got, np.float32):
        np.testing.assert_array_equal(row, np.asarray(want[0], np.float32))
    np.testing.assert_array_equal(np.isnan(np.asarray(want[0], np.float32)), np.isnan(values))


def test_not_a_number_and_infinity_reach_every_result_of_their_row_and_no_other(isa):
    x = np.ones((9, 80), np.float32)
    x[2, 70], x[4, 3], x[6, 0], x[7] = np.nan, np.inf, -np.inf, 1e-40
    w = normal(np.random.default_rng(2), (1, 48, 80), BF16)
    got = np.asarray(native.linear_packed(jnp.asarray(x), native.pack(w), jnp.int32(0), out_dtype=F32))
    assert list(np.isfinite(got).all(axis=1)) == [row not in (2, 4, 6) for row in range(9)]
    assert not np.isfinite(got[[2, 4, 6]]).any()


def test_a_weight_that_is_not_a_number_spoils_its_channel_alone(isa):
    w = np.ones((1, 32, 64), np.float32)
    w[0, 5, 9], w[0, 17, 63], w[0, 20] = np.nan, np.inf, 0
    packed = native.pack(jnp.asarray(w, BF16))
    got = np.asarray(native.linear_packed(jnp.ones((3, 64)), packed, jnp.int32(0), out_dtype=F32))
    assert list(np.isfinite(got).all(axis=0)) == [channel not in (5, 17) for channel in range(32)]
    np.testing.assert_array_equal(got[:, 20], 0)


def test_rows_of_a_packed_matrix_are_found_again(isa):
    w = normal(np.random.default_rng(3), (96, 80), BF16)
    numbers = jnp.asarray([[0, 95, 17], [16, 15, 17]])
    found = native.packed_rows(native.pack(w[None])[0], numbers)
    assert (found.shape, found.dtype) == ((2, 3, 80), F32)
    exact = np.asarray(w, np.float32)[np.asarray(numbers)]
    assert np.abs(found - exact).max() <= np.abs(exact).max() / 8191


def test_packing_only_moves_the_elements_of_a_float32_layer(isa):
    w = normal(np.random.default_rng(1), (3, 32, 2048 + 32), F32)
    packed = native.pack(w)
    assert (packed.shape, packed.dtype) == (w.shape, w.dtype)
    for before, after in zip(w, packed):
        np.testing.assert_array_equal(np.sort(bits(after), axis=None), np.sort(bits(before), axis=None))
        assert not np.array_equal(bits(after), bits(before))


def test_layers_are_chosen_inside_a_compiled_loop(built):
    rng = np.random.default_rng(4)
    x, w = normal(rng, (5, 64), F32), normal(rng, (3, 64, 64), F32) / 8

    @jax.jit
    def through(x: jax.Array, packed: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 3, lambda i, y: native.linear_packed(y, packed, i), x)

    want = x
    for matrix in w:
        want = native.linear(want, matrix)
    np.testing.assert_array_equal(bits(through(x, native.pack(w))), bits(want))


@pytest.mark.parametrize(
    ("shape", "dtype", "fits"),
    [
        ((2, 32, 48), BF16, True),
        ((2, 32, 48), F32, True),
        ((32, 48), BF16, False),
        ((2, 20, 48), BF16, False),
        ((2, 32, 40), BF16, False),
        ((2, 32, 48), jnp.int8, False),
    ],
)
def test_what_can_be_packed_is_packed_and_anything_else_is_named(built, shape, dtype, fits):
    assert native.packable(shape, dtype) == fits
    w = jnp.ones(shape, dtype)
    if fits:
        packed = native.pack(w)
        wanted = (shape, F32) if dtype == F32 else ((*shape[:2], shape[2] + 2), jnp.int16)
        assert (packed.shape, packed.dtype) == wanted
        return
    with pytest.raises(ValueError, match=r"pack: w is .* multiples of 16"):
        native.pack(w)
    if dtype != F32:
        with pytest.raises(ValueError, match=r"linear_packed: w is .*, must come from pack"):
            native.linear_packed(jnp.ones((1, shape[-1])), w, jnp.int32(0))
