"""int8 weights with scales: near the float64 product of what they stand for, by as much as x is rounded."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import native
from jaxserve.native.library import NativeUnavailable, load

BF16, F32 = jnp.bfloat16, jnp.float32
# (N, K, group): one panel and one group, several, a short last group of x, groups wider than one of x, one
# scale a channel, and short of a group of x.
SHAPES = [(16, 32, 32), (48, 96, 32), (160, 576, 32), (32, 256, 128), (48, 1040, 1040), (32, 48, 48)]
# Row tiles of every size, both sides of widening w first, for the larger K two passes.
ROWS = [*range(1, 20), 24, 25, 33, 128, 2100]
X_LIMIT = 127 * 256


class Weights(NamedTuple):
    """Two layers."""

    values: np.ndarray  # [2, N, K] int8
    scales: np.ndarray  # [2, N, K / G] float32
    exact: np.ndarray  # [2, N, K] float64
    packed: jax.Array


def weights(rng: np.random.Generator, channels: int, k: int, group: int) -> Weights:
    values = rng.integers(-128, 128, (2, channels, k)).astype(np.int8)
    scales = rng.uniform(1e-3, 1, (2, channels, k // group)).astype(np.float32)
    exact = values * np.repeat(scales.astype(np.float64), group, axis=2)
    return Weights(values, scales, exact, native.pack_int8(jnp.asarray(values), jnp.asarray(scales)))


def run(x: jax.Array | np.ndarray, packed: jax.Array, out_dtype: jnp.dtype = F32) -> np.ndarray:
    return np.asarray(native.linear_int8(jnp.asarray(x), packed, jnp.int32(1), out_dtype=out_dtype))


@pytest.mark.parametrize(("channels", "k", "group"), SHAPES)
def test_the_product_is_off_by_no_more_than_half_a_unit_of_each_x(isa, channels, k, group):
    rng = np.random.default_rng([channels, k])
    w = weights(rng, channels, k, group)
    for dtype in (BF16, F32):
        x = jnp.asarray(rng.standard_normal((27, k)), dtype)
        x = x.at[3].multiply(1000).at[5, :16].multiply(1e6).at[7].set(0)
        x64 = np.asarray(x, np.float64)
        starts = np.arange(0, k, 64)
        largest = np.maximum.reduceat(np.abs(x64), starts, axis=1)
        half_units = np.repeat(largest / X_LIMIT / 2, np.diff(np.append(starts, k)), axis=1)
        slack = half_units @ np.abs(w.exact[1]).T
        size = np.abs(x64) @ np.abs(w.exact[1]).T
        for rows in (27, 3):  # w widened, and not
            off = np.abs(run(x[:rows], w.packed) - x64[:rows] @ w.exact[1].T)
            assert np.all(off <= 1.01 * slack[:rows] + 1e-6 * size[:rows])


@pytest.mark.parametrize(("channels", "k", "group"), SHAPES)
def test_whole_numbers_up_to_the_limit_of_x_are_multiplied_exactly(isa, channels, k, group):
    rng = np.random.default_rng([channels, k])
    w = weights(rng, channels, k, group)
    x = rng.integers(-X_LIMIT, X_LIMIT + 1, (27, k))
    x[:, ::32] = X_LIMIT
    scale = 2.0 ** rng.integers(-5, 5, w.scales.shape)
    packed = native.pack_int8(jnp.asarray(w.values), jnp.asarray(scale, F32))
    exact = w.values[1] * np.repeat(scale[1], group, axis=1)
    # What is left are sums and conversions in float32.
    limit = 2**-24 * (k // 32 + 2) * (np.abs(x) @ np.abs(exact).T)
    assert np.all(np.abs(run(x.astype(np.float32), packed) - x @ exact.T) <= limit)


@pytest.mark.parametrize(("channels", "k", "group"), [(160, 576, 32), (48, 1040, 1040)])
def test_a_row_has_the_same_bits_among_any_number_of_rows(isa, channels, k, group):
    rng = np.random.default_rng([channels, k])
    packed = weights(rng, channels, k, group).packed
    x = rng.standard_normal((ROWS[-1], k)).astype(np.float32)
    wanted = run(x, packed)
    for rows in ROWS:
        first = int(rng.integers(0, len(x) - rows + 1))
        np.testing.assert_array_equal(run(x[first : first + rows], packed), wanted[first : first + rows])


def test_the_result_is_rounded_to_the_dtype_of_x_as_jax_rounds(isa):
    rng = np.random.default_rng(5)
    packed = weights(rng, 48, 96, 32).packed
    x = jnp.asarray(rng.standard_normal((7, 96)), BF16)
    rounded = native.linear_int8(x, packed, jnp.int32(1))
    assert rounded.dtype == BF16
    np.testing.assert_array_equal(rounded.astype(F32), jnp.asarray(run(x, packed)).astype(BF16).astype(F32))


@pytest.mark.parametrize("group", [32, 96])
@pytest.mark.parametrize("rows", [9, 27])
def test_what_is_no_number_reaches_every_result_of_its_row_or_channel_and_no_other(isa, rows, group):
    rng = np.random.default_rng(2)
    values = rng.integers(-128, 128, (2, 48, 96)).astype(np.int8)
    scales = np.ones((2, 48, 96 // group), np.float32)
    values[1, 7], scales[1, 9], scales[1, 11, -1] = 0, 0, np.nan
    x = np.ones((rows, 96), np.float32)
    x[2, 70], x[4, 3], x[6, 0], x[7] = np.nan, np.inf, -np.inf, 1e-40
    got = run(x, native.pack_int8(jnp.asarray(values), jnp.asarray(scales)))
    bad = [2, 4, 6]
    assert not np.isfinite(got[bad]).any()
    got = np.delete(got, bad, axis=0)
    assert list(np.isfinite(got).all(axis=0)) == [channel != 11 for channel in range(48)]
    np.testing.assert_array_equal(got[:, [7, 9]], 0)


@pytest.mark.parametrize(("channels", "k", "group"), [(48, 96, 32), (32, 256, 128), (32, 48, 48)])
def test_rows_of_a_packed_matrix_are_found_again(isa, channels, k, group):
    rng = np.random.default_rng(3)
    w = weights(rng, channels, k, group)
    numbers = rng.integers(0, channels, (2, 3))
    found = jax.jit(lambda packed: native.int8_rows(packed, jnp.asarray(numbers), k))(w.packed[1])
    assert found.dtype == F32
    np.testing.assert_array_equal(found, w.exact[1][numbers].astype(np.float32))


def test_layers_are_chosen_inside_a_compiled_loop(built):
    rng = np.random.default_rng(4)
    packed = weights(rng, 64, 64, 32).packed
    x = jnp.asarray(rng.standard_normal((5, 64)), F32)

    @jax.jit
    def through(x: jax.Array, packed: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, 2, lambda i, y: native.linear_int8(y, packed, i), x)

    first = native.linear_int8(x, packed, jnp.int32(0))
    np.testing.assert_array_equal(through(x, packed), run(first, packed))


@pytest.mark.parametrize(
    ("shape", "group", "fits"),
    [
        ((2, 32, 96), 32, True),
        ((2, 32, 128), 64, True),
        ((2, 32, 384), 192, True),
        ((2, 32, 48), 48, True),  # one scale a channel
        ((2, 32, 96), 48, False),
        ((2, 32, 96), 16, False),
        ((2, 32, 80), 32, False),
        ((2, 32, 40), 40, False),
        ((2, 20, 96), 32, False),
        ((32, 96), 32, False),
        ((2, 32, 0), 32, False),
        ((2, 32, 96), 0, False),
    ],
)
def test_what_can_be_packed_is_packed_and_anything_else_is_named(built, shape, group, fits):
    assert native.packable_int8(shape, group) == fits
    values = jnp.ones(shape, jnp.int8)
    scales = jnp.ones((*shape[:-1], shape[-1] // group if group else 0), F32)
    if fits:
        packed = native.pack_int8(values, scales)
        assert (packed.shape, packed.dtype) == ((*shape[:2], shape[2] + 4 * scales.shape[2]), jnp.int8)
        return
    with pytest.raises(ValueError, match=r"pack_int8: values int8\[.*multiples of 16, G 32, a multiple"):
        native.pack_int8(values, scales)


def test_dtypes_and_shapes_that_do_not_fit_are_named(built):
    values, scales = jnp.ones((2, 32, 96), jnp.int8), jnp.ones((2, 32, 3))
    for wrong in ((values.astype(jnp.int16), scales), (values, scales.astype(BF16)), (values, scales[:1])):
        with pytest.raises(ValueError, match=r"must be int8 .* and float32"):
            native.pack_int8(*wrong)
    packed = native.pack_int8(values, scales)
    with pytest.raises(ValueError, match="w is int16, must come from pack_int8"):
        native.linear_int8(jnp.ones((1, 96)), packed.astype(jnp.int16), jnp.int32(0))
    for k in (64, 80, 95, 104, 108):
        with pytest.raises(ValueError, match=r"x \(1, \d+\) and w \(2, 32, 108\)"):
            native.linear_int8(jnp.ones((1, k)), packed, jnp.int32(0))
    with pytest.raises(ValueError, match="w is int8, must come from pack"):
        native.linear_packed(jnp.ones((1, 96)), packed, jnp.int32(0))


@pytest.mark.parametrize(("channels", "k", "group"), SHAPES)
def test_all_instruction_sets_with_a_fused_multiply_add_give_the_same_bits(built, channels, k, group):
    rng = np.random.default_rng([channels, k])
    values = rng.integers(-128, 128, (2, channels, k)).astype(np.int8)
    scales = rng.uniform(1e-3, 1, (2, channels, k // group)).astype(np.float32)
    x = rng.standard_normal((45, k)).astype(np.float32)
    library, results = load(), {}
    before = library.isa()
    try:
        for name in ("amx", "avx512", "avx2"):
            try:
                library.use_isa(name)
            except NativeUnavailable:
                continue
            packed = native.pack_int8(jnp.asarray(values), jnp.asarray(scales))
            results[name] = [run(x[:rows], packed).view(np.uint32) for rows in (1, 3, 45)]
    finally:
        library.use_isa(before)
    if len(results) < 2:
        pytest.skip(f"this CPU has only {[*results]} of the instruction sets to compare")
    first, *others = results.values()
    for other in others:
        for got, want in zip(other, first):
            np.testing.assert_array_equal(got, want)
