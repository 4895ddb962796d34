"""The gated activation of a feed-forward block."""

from __future__ import annotations

import jax
import jax.numpy as jnp

ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True)}


def gate_xla(x: jax.Array, activation: str) -> jax.Array:
    """f(x[..., :I]) * x[..., I:] of `x` [..., 2 I], computed in float32, returned in x's dtype."""
    gate, up = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return (ACTIVATIONS[activation](gate) * up).astype(x.dtype)
