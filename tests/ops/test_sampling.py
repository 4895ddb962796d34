"""Sampling against the distribution that temperature, top-k, top-p and min-p leave, worked out in float64."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.ops import sampling
from jaxserve.ops.sampling import NUM_CANDIDATES, SamplingState, greedy

sample = jax.jit(sampling.sample)
filter_weights = jax.jit(sampling._filter)
inverse_cdf = jax.jit(sampling._inverse_cdf)

BIG = 49152
NUM_DRAWS = 20_000


class Params(NamedTuple):
    """One row's parameters."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0


def state_of(rows: Sequence[Params]) -> SamplingState:
    column = lambda name, dtype: np.array([getattr(row, name) for row in rows], dtype)
    seeds = np.array([[row.seed >> 32, row.seed & 0xFFFFFFFF] for row in rows], np.uint32)
    return SamplingState(
        column("temperature", np.float32), column("top_k", np.int32), column("top_p", np.float32),
        column("min_p", np.float32), seeds,
    )  # fmt: skip


def some_logits(vocab: int, seed: int = 0, spread: float = 3.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(vocab) * spread).astype(np.float32)


def weights_of(logits: np.ndarray, temperature: float) -> np.ndarray:
    """Tempered and unnormalised, the largest is 1."""
    return np.exp((logits.astype(np.float64) - logits.max()) / temperature).astype(np.float32)


def kept_weights(weights: np.ndarray, row: Params) -> tuple[np.ndarray, np.ndarray]:
    """(kept, unsure) of `weights` [V]: what stays in, in float64, and where rounding may decide otherwise.

    Top-p is of what top-k leaves; equals of the last that stays in stay in as well.
    """
    w = weights.astype(np.float64)
    kept = w.copy()
    if 0 < row.top_k < len(w):
        kept[w < np.sort(w)[-row.top_k]] = 0
    unsure = np.zeros(len(w), bool)
    if row.top_p < 1:
        order = np.sort(kept)[::-1]
        ahead = np.cumsum(order) - order  # weight in front of each
        goal = float(np.float32(row.top_p)) * order.sum()
        slack = 1e-5 * order.sum()
        border = order[ahead < goal].min() if (ahead < goal).any() else 1.0
        surely_in = order[ahead < goal - slack].min() if (ahead < goal - slack).any() else 1.0
        surely_out = order[ahead < goal + slack].min()
        kept[w < border] = 0
        unsure = (w >= surely_out) & (w < surely_in)
    kept[w < float(np.float32(row.min_p))] = 0
    return kept, unsure


FILTERS = [
    Params(top_k=k, top_p=p, min_p=m)
    for k, p, m in itertools.product(
        (0, 1, 5, NUM_CANDIDATES, NUM_CANDIDATES + 1, 1000, BIG - 1, BIG, BIG + 7),
        (1.0, 0.99, 0.5, 1e-6, 0.0),
        (0.0, 0.05, 1.0),
    )
]


@pytest.mark.parametrize("vocab", [7, 300, BIG])
@pytest.mark.parametrize("temperature", [0.5, 3.0])
def test_filters_leave_exactly_the_tokens_of_the_definition(vocab, temperature):
    weights = weights_of(some_logits(vocab), temperature)
    out = np.asarray(filter_weights(np.tile(weights, (len(FILTERS), 1)), state_of(FILTERS)))
    num_far = 0
    for row, got in zip(FILTERS, out, strict=True):
        wanted, unsure = kept_weights(weights, row)
        assert unsure.sum() <= max(1, vocab // 1000), "the oracle decides nothing"
        differs = (got > 0) != (wanted > 0)
        assert not (differs & ~unsure).any(), f"{row}: {np.flatnonzero(differs & ~unsure)}"
        np.testing.assert_array_equal(got[got > 0], weights[got > 0])
        assert got.max() == 1, f"{row}: the likeliest token is gone"
        num_far += NUM_CANDIDATES < (wanted > 0).sum() < vocab
    assert vocab < BIG or num_far, "no border lay past the candidates"


def test_top_p_past_the_candidates_keeps_the_smallest_sufficient_set():
    weights = weights_of(some_logits(BIG, spread=0.5), 1.0)  # flat: a half takes thousands of tokens
    row = Params(top_p=0.5)
    kept = np.asarray(filter_weights(weights[None], state_of([row])))[0].astype(np.float64)
    total = weights.sum(dtype=np.float64)
    assert np.count_nonzero(kept) > 10 * NUM_CANDIDATES
    assert kept.sum() >= (0.5 - 1e-5) * total
    assert kept.sum() - kept[kept > 0].min() <= (0.5 + 1e-5) * total
    assert kept[kept > 0].min() >= weights[kept == 0].max()


@pytest.mark.parametrize("row", [Params(top_k=3), Params(top_p=0.55), Params(top_k=3, top_p=0.6)])
def test_equals_at_a_border_stay_in(row):
    logits = np.array([2.0, 1.0, 1.0, 1.0, 0.0, -1.0, 1.0], np.float32)
    kept = np.asarray(filter_weights(weights_of(logits, 1.0)[None], state_of([row])))[0]
    np.testing.assert_array_equal(kept > 0, logits >= 1)


def test_equals_at_a_border_past_the_candidates_stay_in():
    logits = np.repeat(np.array([3.0, 2.0, 1.0, 0.0], np.float32), 300)
    rows = [Params(top_k=301), Params(top_k=700), Params(top_p=0.8)]
    kept = np.asarray(filter_weights(np.tile(weights_of(logits, 1.0), (3, 1)), state_of(rows)))
    assert [np.count_nonzero(row) for row in kept] == [600, 900, 600]


def test_what_stays_in_of_a_row_does_not_depend_on_its_batch_mates():
    weights = np.stack([weights_of(some_logits(BIG, seed), 1.0) for seed in range(60)])
    top = -np.sort(-weights.astype(np.float64))[:, :200]
    # A top_p that is met by exactly so many tokens: a rounding decides on the next one.
    ps = np.cumsum(top, axis=1)[np.arange(60), np.arange(60) * 3] / top.sum(axis=1)
    near = [Params(top_k=200, top_p=float(p)) for p in ps]
    alone = np.asarray(filter_weights(weights, state_of(near)))
    # A border far down makes the last row search the whole vocabulary.
    together = filter_weights(weights, state_of([*near[:-1], Params(top_k=20_000)]))
    np.testing.assert_array_equal(np.asarray(together)[:-1], alone[:-1])


@pytest.mark.parametrize("vocab", [7, 300, 512, 513, 5000])
@pytest.mark.parametrize("density", [1.0, 0.1])
def test_a_draw_is_the_inverse_of_the_running_sum(vocab, density):
    rng = np.random.default_rng(vocab)
    weights = (rng.random(vocab) * (rng.random(vocab) < density)).astype(np.float32)
    weights[rng.integers(vocab)] = 1
    uniform = np.concatenate([np.linspace(0, 1, 2047, endpoint=False), [1 - 2**-24]]).astype(np.float32)
    ids = np.asarray(inverse_cdf(np.tile(weights, (2048, 1)), uniform))
    sums = np.cumsum(weights.astype(np.float64))
    wanted = np.searchsorted(sums, uniform.astype(np.float64) * sums[-1], side="right")
    assert (weights[ids] > 0).all()
    # Where float32 rounds across a border, the neighbour on the other side of it is as good.
    for got, right, u in zip(ids, wanted, uniform):
        if got != right:
            border = sums[min(got, right) : max(got, right)]
            assert np.abs(border - u * sums[-1]).max() < 1e-6 * sums[-1]
    assert (ids != wanted).mean() < 0.02


def test_a_token_without_weight_is_never_drawn():
    """Sums that XLA rounds can grow at an entry of weight 0; the draw is aimed exactly there."""
    rng = np.random.default_rng(1)
    weights = np.zeros((200, 512), np.float32)
    for row in weights:
        row[rng.choice(512, 100, replace=False)] = rng.random(100)
    sums = np.asarray(jax.jit(functools.partial(jnp.cumsum, axis=-1))(weights))
    grew = np.diff(sums, prepend=np.float32(0), axis=1) > 0
    rows, columns = np.nonzero(grew & (weights == 0))
    assert len(rows) > 10, "sums no longer grow at zeros: this test aims at nothing"
    target = sums[rows, columns - 1] / sums[rows, -1]
    for nudge in (-1, 0, 1):
        uniform = np.clip(target + nudge * np.spacing(target), 0, 1 - 2**-24).astype(np.float32)
        ids = np.asarray(inverse_cdf(weights[rows], uniform))
        assert (weights[rows, ids] > 0).all()


def test_draws_of_filtered_rows_never_leave_the_filter():
    logits = some_logits(BIG)
    rows = [Params(temperature=0.7, top_k=k, top_p=p, seed=seed)
            for seed in range(40) for k, p in ((3, 1.0), (0, 0.3), (400, 1.0), (50, 0.9))]  # fmt: skip
    ids = np.asarray(sample(np.tile(logits, (len(rows), 1)), state_of(rows), np.arange(len(rows))))
    weights = weights_of(logits, 0.7)
    for row, token in zip(rows, ids):
        wanted, unsure = kept_weights(weights, row)
        assert wanted[token] > 0 or unsure[token]


@pytest.mark.parametrize(
    "row",
    [
        Params(temperature=0.8),
        Params(temperature=1.5, top_k=4),
        Params(temperature=1.0, top_p=0.8),
        Params(temperature=1.0, min_p=0.1),
        Params(temperature=2.0, top_k=6, top_p=0.9, min_p=0.05),
    ],
)
def test_draws_follow_the_distribution(row):
    vocab, num_draws = 8, NUM_DRAWS
    logits = some_logits(vocab, seed=3, spread=1.5)
    expected, _ = kept_weights(weights_of(logits, row.temperature), row)
    expected = expected / expected.sum() * num_draws
    seeds = np.random.default_rng(0).integers(2**64, size=num_draws // 100, dtype=np.uint64)
    rows = state_of([row._replace(seed=int(seeds[i // 100])) for i in range(num_draws)])
    ids = np.asarray(sample(np.tile(logits, (num_draws, 1)), rows, np.arange(num_draws) % 100))
    counts = np.bincount(ids, minlength=vocab)
    assert not counts[expected == 0].any()
    possible = expected > 0
    chi_square = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    assert chi_square < 30  # one in 10,000 at 7 degrees of freedom


def test_draws_at_neighbouring_positions_and_seeds_are_independent():
    logits = np.zeros(8, np.float32)
    num = NUM_DRAWS
    for seeds, positions in (([7] * num, range(num)), (range(num), [3] * num)):
        rows = state_of([Params(seed=seed) for seed in seeds])
        ids = np.asarray(sample(np.tile(logits, (num, 1)), rows, np.array(positions)))
        pairs = np.bincount(8 * ids[:-1] + ids[1:], minlength=64)
        expected = (num - 1) / 64
        assert ((pairs - expected) ** 2 / expected).sum() < 111  # one in 10,000 at 63 degrees of freedom


def test_the_key_of_a_token_is_the_seed_folded_with_the_position():
    for seed, position in ((0, 0), (5, 17), (2**32 - 1, 8191)):
        mine = sampling._uniform(jnp.array([0, seed], jnp.uint32), jnp.int32(position))
        assert mine == jax.random.uniform(jax.random.fold_in(jax.random.key(np.uint32(seed)), position))


def test_both_halves_of_a_64_bit_seed_matter():
    positions = np.arange(20)
    streams = set()
    for seed in (1, 1 << 32, (1 << 32) + 1, 1 << 63, (1 << 63) + 1, 2**64 - 1, 2**64 - 2):
        rows = state_of([Params(seed=seed)] * 20)
        streams.add(tuple(np.asarray(sample(np.zeros((20, 300), np.float32), rows, positions)).tolist()))
    assert len(streams) == 7


MIXTURE = [
    Params(temperature=0.0), Params(seed=1), Params(temperature=0.6, top_k=40, seed=2),
    Params(temperature=0.0, top_k=5, top_p=0.1), Params(top_p=0.9, seed=3),
    Params(min_p=0.02, seed=2**63 + 5), Params(temperature=1.3, top_k=3000, top_p=0.97, seed=2**64 - 1),
    Params(top_p=0.0, seed=9),
]  # fmt: skip


def test_a_token_does_not_depend_on_its_row_or_batch_mates():
    B = len(MIXTURE)
    for round_ in range(6):
        logits = np.stack([some_logits(5000, seed=10 * round_ + i) for i in range(B)])
        positions = np.arange(B) * 7 + round_
        together = np.asarray(sample(logits, state_of(MIXTURE), positions))
        order = np.random.default_rng(round_).permutation(B)
        shuffled = sample(logits[order], state_of([MIXTURE[i] for i in order]), positions[order])
        np.testing.assert_array_equal(np.asarray(shuffled), together[order])
        for i in range(B):
            alone = sample(logits[i : i + 1], state_of([MIXTURE[i]]), positions[i : i + 1])
            assert alone[0] == together[i]


def test_greedy_rows_of_a_mixed_batch_take_the_likeliest_token():
    logits = np.stack([some_logits(5000, seed=i) for i in range(len(MIXTURE))])
    ids = np.asarray(sample(logits, state_of(MIXTURE), np.arange(len(MIXTURE))))
    rows = [0, 3, 7]  # temperature 0 twice, and a top_p of 0
    np.testing.assert_array_equal(ids[rows], logits[rows].argmax(1))


@pytest.mark.parametrize("vocab", [1, 7, 64, 513, 40_000])
def test_the_largest_are_found_whatever_block_they_lie_in(vocab):
    rng = np.random.default_rng(vocab)
    values = rng.integers(0, 50 * vocab, (6, vocab)).astype(np.float32)
    values[0] = np.sort(values[0])[::-1]  # all of the largest side by side
    values[1] = rng.integers(0, 3, vocab)  # nearly all are equals
    count = min(vocab, NUM_CANDIDATES)
    found = jax.jit(sampling.largest, static_argnums=1)(values, count)
    np.testing.assert_array_equal(np.asarray(found), -np.sort(-values, axis=1)[:, :count])
    np.testing.assert_array_equal(np.asarray(greedy(jnp.asarray(values))), values.argmax(1))


def test_greedy_takes_the_first_of_equals():
    logits = np.array([[0.0, 5.0, 5.0, 1.0], [2.0, 2.0, 2.0, 2.0]], np.float32)
    np.testing.assert_array_equal(np.asarray(greedy(jnp.asarray(logits))), [1, 0])
    np.testing.assert_array_equal(
        np.asarray(sample(logits, state_of([Params(temperature=0.0)] * 2), np.arange(2))), [1, 0]
    )


@pytest.mark.parametrize("row", [Params(top_k=1), Params(top_p=1e-6), Params(min_p=1.0), Params(top_p=0.0),
                                 Params(temperature=1e-6), Params(temperature=1e-30),
                                 Params(temperature=1e-40), Params(top_p=1e-45)])  # fmt: skip
def test_the_narrowest_setting_of_each_parameter_is_greedy(row):
    logits = np.stack([some_logits(300, seed=i) for i in range(20)])
    rows = state_of([row._replace(seed=i) for i in range(20)])
    np.testing.assert_array_equal(np.asarray(sample(logits, rows, np.arange(20))), logits.argmax(1))


@pytest.mark.parametrize("vocab", [7, 513])
def test_broken_logits_give_ids_of_the_vocabulary_and_harm_no_other_row(vocab):
    good = some_logits(vocab)
    rows = [Params(seed=1), *[Params(top_k=5, seed=3)] * 3, Params(top_p=0.5, seed=4),
            Params(temperature=0.0), Params(top_k=2, seed=5)]  # fmt: skip
    fine = np.asarray(sample(np.tile(good, (7, 1)), state_of(rows), np.arange(7)))
    for value in (np.nan, np.inf, -np.inf):
        broken, one = np.full(vocab, value, np.float32), good.copy()
        one[3] = value
        logits = np.stack([good, broken, one, broken, one, broken, good])
        ids = np.asarray(sample(logits, state_of(rows), np.arange(7)))
        assert ((ids >= 0) & (ids < vocab)).all()
        np.testing.assert_array_equal(ids[[0, 6]], fine[[0, 6]])
        assert 0 <= int(greedy(jnp.asarray(broken[None]))[0]) < vocab
