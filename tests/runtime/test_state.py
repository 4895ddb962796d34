from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.config import EngineConfig
from jaxserve.runtime.state import (
    kv_bytes_per_token,
    kv_shapes,
    pack_params,
    state_shapes,
    unpack_params,
    zeros,
)
from jaxserve.types import SamplingParams

unpack = jax.jit(unpack_params)


@settings(max_examples=60, derandomize=True)
@given(
    st.floats(0, 1e30), st.integers(0, 2**63), st.floats(0, 1), st.floats(0, 1),
    st.integers(-(2**63), 2**64 - 1),
)  # fmt: skip
def test_sampling_parameters_arrive_on_the_device_as_they_are(temperature, top_k, top_p, min_p, seed):
    params = SamplingParams(1, temperature, top_k, top_p, min_p, seed)
    state = unpack(pack_params(params)[None])
    assert state.temperature[0] == np.float32(temperature)
    assert state.top_k[0] == min(top_k, 2**31 - 1)
    assert state.top_p[0] == np.float32(top_p)
    assert state.min_p[0] == np.float32(min_p)
    high, low = (int(half) for half in state.seed[0])
    assert (high << 32) + low == seed % 2**64


@pytest.mark.parametrize("lanes", [None, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_a_positions_bytes_are_the_pools_bytes_over_its_positions(llama, dtype, lanes):
    config = EngineConfig(max_model_len=64, num_pages=11, page_size=8)
    pool = kv_shapes(llama.model, config, dtype, lanes)
    nbytes = sum(array.size * jnp.dtype(array.dtype).itemsize for array in pool)
    assert nbytes == 88 * kv_bytes_per_token(llama.model, dtype, lanes)


def test_there_is_a_trash_slot_beside_the_slots():
    config = EngineConfig(max_model_len=64, num_pages=11, page_size=8, max_num_seqs=3)
    state = zeros(state_shapes(config))
    assert {array.shape[0] for array in state} == {4}
    assert state.page_table.shape[1] == config.pages_per_seq
    assert not any(array.any() for array in state)
