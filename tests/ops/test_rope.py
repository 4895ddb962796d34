from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.models.rope_scaling import frequencies
from jaxserve.ops.rope import apply_rope, rope_angles


def angles_of(positions: jnp.ndarray, dim: int, theta: float) -> tuple[jnp.ndarray, jnp.ndarray]:
    cos, sin = rope_angles(positions, jnp.asarray([frequencies(dim, theta)], jnp.float32))
    return cos[0], sin[0]


@pytest.mark.parametrize("theta", [10_000.0, 1_000_000.0])
@pytest.mark.parametrize("dim", [16, 64, 256])
def test_rope_turns_each_pair_by_its_angle(theta, dim):
    rng = np.random.default_rng(0)
    positions = np.array([[0, 1, 2, 511], [5, 600, 1200, 8000]])
    x = rng.standard_normal((2, 4, 3, dim)).astype(np.float32)
    # A pair of elements is a complex number; a position turns it by position * theta^(-2i/D).
    pairs = x[..., : dim // 2].astype(np.float64) + 1j * x[..., dim // 2 :]
    angles = positions[..., None] * theta ** (-np.arange(0, dim, 2) / dim)
    turned = pairs * np.exp(1j * angles)[:, :, None, :]
    out = np.asarray(apply_rope(jnp.asarray(x), angles_of(jnp.asarray(positions, jnp.int32), dim, theta)))
    # Float32 angles: their error grows with the position.
    tolerance = 1e-5 + 1e-6 * positions[..., None, None]
    assert (np.abs(out[..., : dim // 2] - turned.real) < tolerance).all()
    assert (np.abs(out[..., dim // 2 :] - turned.imag) < tolerance).all()


def test_scores_depend_on_the_distance_of_positions_alone():
    rng = np.random.default_rng(1)
    q, k = (jnp.asarray(rng.standard_normal((1, 1, 1, 32)), jnp.float32) for _ in range(2))

    def score(at_q: int, at_k: int) -> float:
        turned = [
            apply_rope(x, angles_of(jnp.asarray([[at]]), 32, 10_000.0)) for x, at in ((q, at_q), (k, at_k))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(40, 31) == pytest.approx(score(9, 0), abs=1e-4)
    assert abs(score(40, 31) - score(40, 30)) > 1e-3


def test_rope_keeps_the_type_and_position_zero_as_they_are():
    x = jnp.asarray(np.random.default_rng(2).standard_normal((1, 1, 2, 8)), jnp.bfloat16)
    out = apply_rope(x, angles_of(jnp.zeros((1, 1), jnp.int32), 8, 10_000.0))
    assert out.dtype == jnp.bfloat16
    np.testing.assert_array_equal(np.asarray(out, np.float32), np.asarray(x, np.float32))


def test_a_part_of_each_head_may_be_turned_and_the_rest_stays():
    x = jnp.asarray(np.random.default_rng(2).standard_normal((1, 3, 2, 24)), jnp.float32)
    angles = angles_of(jnp.asarray([[3, 4, 5]]), 16, 100.0)
    out = apply_rope(x, angles)
    np.testing.assert_array_equal(out[..., 16:], x[..., 16:])
    np.testing.assert_array_equal(out[..., :16], apply_rope(x[..., :16], angles))
