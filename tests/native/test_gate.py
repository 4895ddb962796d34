"""The gated activation against float64."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import native
from jaxserve.ops.backend import choose
from jaxserve.ops.gate import gate_xla


def exact(x: np.ndarray, activation: str) -> np.ndarray:
    a, b = np.split(x.astype(np.float64), 2, axis=-1)
    z = a if activation == "silu" else 2 * math.sqrt(2 / math.pi) * (a + 0.044715 * a**3)
    with np.errstate(over="ignore"):
        return a / (1 + np.exp(-z)) * b


@pytest.mark.parametrize("gate", [native.gate, gate_xla], ids=["native", "xla"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(("rows", "width"), [(1, 1), (3, 23), (5, 1536), (130, 1536)])
def test_the_gate_is_that_of_float64_to_a_rounding(isa, gate, activation, rows, width):
    x = np.random.default_rng([rows, width]).normal(0, 4, (rows, 2 * width)).astype(np.float32)
    x[0, 0] = -200.0  # whose exponential overflows
    for dtype, relative in ((jnp.float32, 2e-6), (jnp.bfloat16, 2**-8)):
        given = jnp.asarray(x, dtype)
        got = gate(given, activation)
        assert (got.shape, got.dtype) == ((rows, width), dtype)
        want = exact(np.asarray(given, np.float64), activation)
        # 1 + tanh, as XLA has it, loses a small activation's last digits where it is nearly 0.
        atol = 2e-5 if gate is gate_xla else 1e-6
        np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=relative, atol=atol)


def test_the_gate_of_gpt_oss_is_that_of_float64_and_taken_where_native_kernels_are(isa):
    x = np.random.default_rng(3).normal(0, 6, (9, 2 * 40)).astype(np.float32)
    gate, up = np.split(x.astype(np.float64), 2, axis=-1)
    assert gate.max() > 7
    assert np.abs(up).max() > 7
    gate, up = np.minimum(gate, 7), np.clip(up, -7, 7)
    want = gate / (1 + np.exp(-1.702 * gate)) * (up + 1)
    got = choose().gate(jnp.asarray(x), "swiglu_oai")
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_what_is_not_a_number_stays_so_and_other_elements_do_not_care(isa):
    x = np.ones((2, 64), np.float32)
    x[0, 3], x[0, 40], x[1, 20] = np.nan, np.inf, -np.inf
    got = np.asarray(native.gate(jnp.asarray(x), "silu"))
    assert list(np.argwhere(~np.isfinite(got)).tolist()) in ([[0, 3], [0, 8]], [[0, 3], [0, 8], [1, 20]])


def test_leading_axes_stay_and_it_works_in_a_compiled_loop(built):
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 3, 8)), jnp.float32)
    twice = jax.jit(lambda x: jax.lax.fori_loop(0, 2, lambda _, y: jnp.tile(native.gate(y, "silu"), 2), x))(x)
    want = np.tile(exact(np.tile(exact(np.asarray(x), "silu"), 2), "silu"), 2)
    np.testing.assert_allclose(twice, want, rtol=1e-5, atol=1e-6)


def test_other_activations_and_odd_widths_are_named(built):
    with pytest.raises(ValueError, match="activation 'relu' must be one of silu, gelu_tanh"):
        native.gate(jnp.ones((1, 4)), "relu")
    with pytest.raises(ValueError, match="even width"):
        native.gate(jnp.ones((1, 5)), "silu")
