"""Rotary position embedding, in the half-split layout that Hugging Face checkpoints use."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def rope_angles(positions: jax.Array, head_dim: int, theta: float) -> tuple[jax.Array, jax.Array]:
    """Cosines and sines [B, Q, D/2], float32, for `positions` [B, Q]. Shared by all layers of one theta."""
    inv_freq = theta ** (-jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)  # [D/2]
    angles = positions.astype(jnp.float32)[..., None] * inv_freq  # [B, Q, D/2]
    return jnp.cos(angles), jnp.sin(angles)


def apply_rope(x: jax.Array, angles: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate `x` [B, Q, N, D]: element i pairs with element i + D/2.

    Source: Su et al. 2021, arXiv:2104.09864, section 3.2.
    """
    cos, sin = (a[:, :, None, :] for a in angles)  # [B, Q, 1, D/2]
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)
