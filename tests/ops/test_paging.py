from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.ops.paging import head_scales, quantise_heads, read_kv, token_shape, write_indices, write_kv

K, D = 2, 3
find = jax.jit(write_indices, static_argnames="page_size")
write = jax.jit(write_kv)
quantise = jax.jit(quantise_heads)


@settings(max_examples=40, derandomize=True)
@given(data=st.data())
def test_tokens_land_on_their_pages_and_padding_only_in_the_trash_page(data):
    page_size = data.draw(st.sampled_from([1, 16]))
    B, Q, P = data.draw(st.sampled_from([1, 4])), data.draw(st.sampled_from([1, 7])), 5
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    num_pages = 1 + B * P
    free = rng.permutation(np.arange(1, num_pages)).reshape(B, P)
    query_lens = np.array([data.draw(st.integers(0, min(Q, P * page_size))) for _ in range(B)])
    start = np.array([data.draw(st.integers(0, P * page_size - n)) for n in query_lens])
    table = rng.integers(-(2**31), 2**31, (B, P)).astype(np.int32)  # garbage past a row's context
    for b in range(B):
        used = -(-(start[b] + query_lens[b]) // page_size)
        table[b, :used] = free[b, :used]

    positions = start[:, None] + np.arange(Q)
    valid = np.arange(Q) < query_lens[:, None]
    indices = find(table, positions.astype(np.int32), valid, page_size=page_size)
    pool = rng.standard_normal((2, num_pages * page_size, K, D)).astype(np.float32)
    new = rng.standard_normal((B, Q, K, D)).astype(np.float32)
    out = np.asarray(write(pool, np.int32(1), new, indices))

    wanted = pool.copy()
    for b in range(B):
        for i in range(query_lens[b]):
            page, offset = divmod(int(start[b]) + i, page_size)
            wanted[1, free[b, page] * page_size + offset] = new[b, i]
    np.testing.assert_array_equal(out[0], pool[0])
    np.testing.assert_array_equal(out[1, page_size:], wanted[1, page_size:])
    if valid.all():
        np.testing.assert_array_equal(out, wanted)


@settings(max_examples=60, derandomize=True)
@given(st.integers(0, 999), st.sampled_from([1e-20, 1e-3, 1.0, 1e20]))
def test_a_head_in_int8_is_off_by_half_a_step_of_its_largest_at_most(seed, size):
    heads = (np.random.default_rng(seed).standard_normal((5, K, 16)) * size).astype(np.float32)
    heads[0, 0] = 0
    kept = quantise(heads)
    assert (kept.dtype, kept.shape) == (jnp.int8, (5, K, 20))
    scales = np.asarray(head_scales(kept)).astype(np.float64)
    largest = np.abs(heads).max(axis=-1)
    np.testing.assert_allclose(scales, largest / 127, rtol=1e-6)
    error = np.abs(np.asarray(kept)[..., :16] * scales[..., None] - heads).max(axis=-1)
    assert (error <= largest / 127 * 0.5001).all()


@pytest.mark.parametrize("lanes", [None, 32])
def test_an_int8_pool_gives_back_what_was_written(lanes):
    rng = np.random.default_rng(0)
    new = rng.standard_normal((2, 3, K, 16)).astype(np.float32)
    indices = rng.permutation(12)[:6].reshape(2, 3)
    pool = jnp.zeros((2, 12, *token_shape(K, 16, jnp.int8, lanes)), jnp.int8)
    pool = write(pool, jnp.int32(1), new, indices)
    found = read_kv(pool, jnp.int32(1), indices, num_kv_heads=K, head_dim=16)
    np.testing.assert_array_equal(np.asarray(found), np.asarray(quantise(new)))
    assert not np.asarray(pool[0]).any()


def test_writing_casts_to_the_pools_type():
    pool = jnp.zeros((1, 4, K, D), jnp.bfloat16)
    out = write_kv(pool, jnp.int32(0), jnp.full((1, 1, K, D), 1.00390625), jnp.asarray([[2]]))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(out[0, 2], np.float32), np.full((K, D), 1.0))


def test_writing_into_a_donated_pool_takes_no_second_pool():
    pool = jax.ShapeDtypeStruct((2, 1 << 16, K, 64), jnp.float32)
    args = (jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((4, 8, K, 64), jnp.float32))
    index = jax.ShapeDtypeStruct((4, 8), jnp.int32)
    memory = jax.jit(write_kv, donate_argnums=0).lower(pool, *args, index).compile().memory_analysis()
    nbytes = 2 * (1 << 16) * K * 64 * 4
    assert memory.alias_size_in_bytes >= nbytes
    assert memory.temp_size_in_bytes < nbytes // 100
