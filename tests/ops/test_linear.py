from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.ops.backend import XLA


@pytest.mark.parametrize("layer", [None, 0, 2])
@pytest.mark.parametrize("shape", [(1, 48), (2, 48), (7, 48), (2, 3, 48), (48,)])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_dense_layer_equals_float64(backend, dtype, shape, layer):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal(shape), dtype)
    weight = jnp.asarray(rng.standard_normal((20, 48) if layer is None else (3, 20, 48)), dtype)
    out = jax.jit(backend.linear)(x, weight, None if layer is None else jnp.int32(layer))
    matrix = np.asarray(weight if layer is None else weight[layer]).astype(np.float64)
    wanted = np.asarray(x).astype(np.float64) @ matrix.T
    assert out.dtype == dtype
    assert out.shape == (*shape[:-1], 20)
    # Sums are float32; a bfloat16 result is rounded once, to 8 bits.
    rtol, atol = (0, 2e-5) if dtype == jnp.float32 else (2**-8, 1e-4)
    np.testing.assert_allclose(np.asarray(out).astype(np.float64), wanted, rtol=rtol, atol=atol)


def test_one_bfloat16_row_runs_as_two_on_xla():
    row, weight = jnp.ones((1, 64), jnp.bfloat16), jnp.ones((32, 64), jnp.bfloat16)
    equations = jax.make_jaxpr(XLA.linear)(row, weight).eqns
    dots = [one.invars[0].aval.shape for one in equations if one.primitive.name == "dot_general"]
    assert dots == [(2, 64)]
