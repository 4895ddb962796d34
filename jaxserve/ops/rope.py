"""Rotary position embedding, in the half-split layout that Hugging Face checkpoints use."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rope_angles(positions: jax.Array, frequencies: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines, float32 [R, B, Q, D/2], for `positions` [B, Q] and R sets `frequencies` [R, D/2]."""
    angles = positions.astype(jnp.float32)[..., None] * frequencies[:, None, None, :]
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate the first D of the values of each head of `x` [B, Q, N, H]: element i pairs with i + D/2.

    Source: Su et al. 2021, arXiv:2104.09864, section 3.2.
    """
    cos, sin = (a[:, :, None, :] for a in angles)  # [B, Q, 1, D/2]
    half = cos.shape[-1]
    first, second, rest = jnp.split(x.astype(jnp.float32), (half, 2 * half), axis=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin, rest]
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)
