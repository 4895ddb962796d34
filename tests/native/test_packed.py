"""Packed weights: the row-major kernel's bits for every number of rows, and nothing but another order."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import native

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


@pytest.mark.parametrize(("x_dtype", "w_dtype"), [(BF16, BF16), (F32, F32), (F32, BF16)])
@pytest.mark.parametrize(("channels", "k"), SHAPES)
def test_packed_weights_give_the_bits_of_row_major_ones_for_any_number_of_rows(
    isa, channels, k, x_dtype, w_dtype
):
    rng = np.random.default_rng([channels, k])
    x, w = normal(rng, (ROWS[-1], k), x_dtype), normal(rng, (2, channels, k), w_dtype)
    packed = native.pack(w)
    wanted = bits(native.linear(x, w[1], out_dtype=F32))
    for rows in ROWS if (channels, w_dtype) == (160, BF16) else FEW_ROWS:
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


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_packing_only_moves_the_elements_of_a_layer(isa, dtype):
    w = normal(np.random.default_rng(1), (3, 32, 2048 + 32), dtype)
    packed = native.pack(w)
    assert (packed.shape, packed.dtype) == (w.shape, w.dtype)
    for before, after in zip(w, packed):
        np.testing.assert_array_equal(np.sort(bits(after), axis=None), np.sort(bits(before), axis=None))
        assert not np.array_equal(bits(after), bits(before))


def test_layers_are_chosen_inside_a_compiled_loop(built):
    rng = np.random.default_rng(4)
    x, w = normal(rng, (5, 64), F32), normal(rng, (3, 64, 64), BF16) / 8

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
        assert native.pack(w).shape == shape
        return
    with pytest.raises(ValueError, match=r"pack: w is .* multiples of 16"):
        native.pack(w)
    with pytest.raises(ValueError, match=r"linear_packed: w is .* multiples of 16"):
        native.linear_packed(jnp.ones((1, shape[-1])), w, jnp.int32(0))
