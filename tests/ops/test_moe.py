from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.ops.moe import mix_experts, route

H = 8


def dense(
    x: np.ndarray, experts: np.ndarray, weights: np.ndarray, is_live: np.ndarray, matrices: np.ndarray
) -> np.ndarray:
    """Every expert on every row, then the weighted sum of those that were picked."""
    every = np.einsum("th,ehi->tei", x.astype(np.float64), matrices) ** 2  # not linear, as experts aren't
    out = np.zeros((len(x), H))
    for row in np.nonzero(is_live)[0]:
        for expert, weight in zip(experts[row], weights[row]):
            out[row] += weight * every[row, expert]
    return out


def mixed(
    x: np.ndarray, experts: np.ndarray, weights: np.ndarray, is_live: np.ndarray, matrices: np.ndarray
) -> tuple[np.ndarray, list[int]]:
    """The result, and the experts that were run, in order."""
    runs: list[int] = []

    def expert(rows: jax.Array, number: jax.Array) -> jax.Array:
        jax.debug.callback(lambda n: runs.append(int(n)), number, ordered=True)
        return (rows @ jnp.asarray(matrices)[number]) ** 2

    out = jax.jit(lambda *args: mix_experts(*args, expert, num_experts=len(matrices)))(
        x, experts, weights, is_live
    )
    jax.effects_barrier()
    return np.asarray(out), runs


@st.composite
def batches(draw: st.DrawFn) -> tuple[np.ndarray, ...]:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    num_experts = draw(st.sampled_from([1, 2, 5, 16]))
    rows, active = draw(st.sampled_from([1, 2, 7, 40])), draw(st.integers(1, num_experts))
    if draw(st.booleans()):  # as a router picks
        experts = np.argsort(rng.random((rows, num_experts)))[:, :active]
    else:  # all rows to the same
        experts = np.tile(rng.permutation(num_experts)[:active], (rows, 1))
    return (
        rng.standard_normal((rows, H)).astype(np.float32), experts.astype(np.int32),
        rng.random((rows, active)).astype(np.float32), rng.random(rows) < draw(st.sampled_from([0, 0.5, 1])),
        rng.standard_normal((num_experts, H, H)).astype(np.float32) / H,
    )  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(batches())
def test_experts_are_mixed_as_if_all_were_run_and_none_is_run_for_nobody(batch):
    out, runs = mixed(*batch)
    np.testing.assert_allclose(out, dense(*batch), rtol=1e-4, atol=1e-5)
    _, experts, _, is_live, _ = batch
    assert set(runs) == set(experts[is_live].ravel().tolist())


def test_each_expert_in_use_is_read_once_by_a_decode_step():
    """8 rows, 2 of 16 experts each: a block holds a row, but one expert's rows may need several."""
    rng = np.random.default_rng(0)
    experts = np.array([[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]], np.int32)
    x, weights = rng.standard_normal((8, H)).astype(np.float32), np.ones((8, 2), np.float32)
    _, runs = mixed(x, experts, weights, np.ones(8, bool), rng.standard_normal((16, H, H)).astype(np.float32))
    assert runs == list(range(16))


def test_a_rows_bits_do_not_depend_on_its_neighbours():
    rng = np.random.default_rng(1)
    x, weights = rng.standard_normal((12, H)).astype(np.float32), rng.random((12, 3)).astype(np.float32)
    experts = np.argsort(rng.random((12, 6)))[:, :3].astype(np.int32)
    matrices = rng.standard_normal((6, H, H)).astype(np.float32)
    alone, beside = np.zeros(12, bool), np.ones(12, bool)
    alone[4] = True
    got = [mixed(x, experts, weights, live, matrices)[0][4] for live in (alone, beside)]
    np.testing.assert_array_equal(*got)


@pytest.mark.parametrize("normalise", [True, False])
def test_the_router_takes_the_likeliest(normalise):
    logits = np.log(np.array([[0.1, 0.4, 0.2, 0.3], [0.7, 0.1, 0.1, 0.1]], np.float32))
    experts, weights = route(jnp.asarray(logits), 2, normalise=normalise)
    assert experts.tolist()[0] == [1, 3]
    assert experts.tolist()[1] == [0, 1]  # the lowest number of those alike
    total = np.array([[0.7], [0.8]]) if normalise else 1
    np.testing.assert_allclose(weights, np.array([[0.4, 0.3], [0.7, 0.1]]) / total, rtol=1e-5)
