"""Rows written into a pool: what jnp's scatter writes, in place, in a loop too."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import native
from jaxserve.ops.paging import head_scales, quantise_heads


def case(seed: int, rows: int, dtype=jnp.bfloat16):
    rng = np.random.default_rng(seed)
    pool = jnp.asarray(rng.standard_normal((3, 40, 2, 16)), dtype)
    new = jnp.asarray(rng.standard_normal((rows, 2, 16)), dtype)
    return pool, new, jnp.asarray(rng.permutation(40)[:rows], jnp.int32)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("rows", [0, 1, 7, 40])
def test_rows_are_written_where_a_scatter_writes_them(built, rows, dtype):
    pool, new, at = case(rows, rows, dtype)
    got = native.write_rows(pool, jnp.int32(1), new, at)
    want = pool.at[1, at].set(new)
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_floats_become_the_int8_heads_that_xla_makes_of_them(built, dtype):
    _, new, at = case(4, 7, dtype)
    new = new.at[2, 1].set(0.0).at[4, 0, 3].set(jnp.nan).at[5].set(new[5] * 1e30)
    pool = jnp.full((3, 40, 2, 20), 7, jnp.int8)
    got = native.write_rows(pool, jnp.int32(1), new, at)
    want = pool.at[1, at].set(quantise_heads(new))
    rows = np.array([0, 1, 2, 3, 5, 6])  # of a NaN only the scale counts
    np.testing.assert_array_equal(np.asarray(got)[1, at[rows]], np.asarray(want)[1, at[rows]])
    assert np.isnan(np.asarray(head_scales(got[1, at[4], 0])))
    np.testing.assert_array_equal(np.delete(np.asarray(got)[1], at, axis=0), 7)


def test_an_index_outside_of_the_layer_is_left_out(built):
    pool, new, _ = case(1, 3)
    got = native.write_rows(pool, jnp.int32(2), new, jnp.asarray([-1, 5, 40]))
    np.testing.assert_array_equal(
        np.asarray(got, np.float32), np.asarray(pool.at[2, 5].set(new[1]), np.float32)
    )


def test_a_donated_pool_is_written_in_place_by_every_layer_of_a_loop(built):
    pool, new, at = case(2, 5)
    want = pool.at[:, at].set(new)
    write = jax.jit(
        lambda p, n, i: jax.lax.fori_loop(0, 3, lambda layer, q: native.write_rows(q, layer, n, i), p),
        donate_argnums=0,
    )
    compiled = write.lower(pool, new, at).compile()
    assert compiled.memory_analysis().alias_size_in_bytes == pool.nbytes
    assert compiled.memory_analysis().temp_size_in_bytes < pool.nbytes // 4
    address = pool.unsafe_buffer_pointer()
    got = compiled(pool, new, at)
    assert got.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(np.asarray(got, np.float32), np.asarray(want, np.float32))


def test_a_pool_that_is_still_needed_stays_as_it_was(built):
    pool, new, at = case(3, 4)
    before = np.array(pool, np.float32)
    jax.jit(native.write_rows)(pool, jnp.int32(0), new, at).block_until_ready()
    np.testing.assert_array_equal(np.asarray(pool, np.float32), before)


def test_shapes_and_dtypes_that_do_not_fit_are_named(built):
    pool, new, at = case(4, 4)
    for bad in ((new[:3], at), (new.astype(jnp.float32), at), (new[:, :1], at)):
        with pytest.raises(ValueError, match="write_rows: pool bfloat16"):
            native.write_rows(pool, jnp.int32(0), *bad)
