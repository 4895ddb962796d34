"""The gated activation of a feed-forward block."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

SWIGLU_LIMIT, SWIGLU_SLOPE = 7.0, 1.702  # of "swiglu_oai"


def _swiglu_oai(gate: jax.Array, up: jax.Array) -> jax.Array:
    """The gate of gpt-oss. Source: swiglu of its reference code (github.com/openai/gpt-oss)."""
    gate = jnp.minimum(gate, SWIGLU_LIMIT)
    up = jnp.clip(up, -SWIGLU_LIMIT, SWIGLU_LIMIT)
    return gate * jax.nn.sigmoid(SWIGLU_SLOPE * gate) * (up + 1)


ACTIVATIONS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "silu": lambda gate, up: jax.nn.silu(gate) * up,
    "gelu_tanh": lambda gate, up: jax.nn.gelu(gate, approximate=True) * up,
    "swiglu_oai": _swiglu_oai,
}


def gate_xla(x: jax.Array, activation: str) -> jax.Array:
    """f(x[..., :I], x[..., I:]) of `x` [..., 2 I], computed in float32, returned in x's dtype."""
    gate, up = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return ACTIVATIONS[activation](gate, up).astype(x.dtype)
