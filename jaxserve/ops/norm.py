"""RMS normalisation."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rms_norm(x: jax.Array, weight: jax.Array, *, eps: float) -> jax.Array:
    """Normalise the last axis of `x` [..., H] by its root mean square and scale by `weight` [H].

    Computed in float32, returned in x's dtype. Source: Zhang & Sennrich 2019, arXiv:1910.07467.
    """
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return (wide * scale * weight.astype(jnp.float32)).astype(x.dtype)
