from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.ops.norm import rms_norm


@pytest.mark.parametrize("shape", [(5,), (3, 64), (2, 3, 4, 16)])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4])
def test_rms_norm_equals_float64(shape, size):
    rng = np.random.default_rng(0)
    x, weight = rng.standard_normal(shape) * size, rng.standard_normal(shape[-1])
    x, weight = x.astype(np.float32), weight.astype(np.float32)
    wide = x.astype(np.float64)
    wanted = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-6) * weight
    np.testing.assert_allclose(rms_norm(jnp.asarray(x), jnp.asarray(weight), eps=1e-6), wanted, rtol=2e-6)


def test_rms_norm_of_bfloat16_sums_in_float32_and_rounds_once():
    rng = np.random.default_rng(1)
    x = jnp.asarray(rng.standard_normal((4, 4096)) * 100, jnp.bfloat16)
    weight = jnp.asarray(rng.standard_normal(4096), jnp.float32)
    out = rms_norm(x, weight, eps=1e-6)
    assert out.dtype == jnp.bfloat16
    exact = rms_norm(x.astype(jnp.float32), weight, eps=1e-6).astype(jnp.bfloat16)
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(exact, np.float32))


def test_rms_norm_of_zeros_is_zero():
    assert not rms_norm(jnp.zeros((2, 8)), jnp.ones(8), eps=1e-6).any()
