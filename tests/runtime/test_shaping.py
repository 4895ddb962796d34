"""Shaped logits against a NumPy oracle, on the distribution and on draws; and what a slot has seen."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.plan import History
from jaxserve.ops.sampling import SamplingState, sample
from jaxserve.ops.shaping import FORBIDDEN, IN_PROMPT, MAX_COUNT, Shaping
from jaxserve.runtime import shaping
from jaxserve.runtime.shaping import allowed_words, num_words, shaping_bytes, shaping_shapes, slot_shaping
from jaxserve.runtime.state import zeros
from jaxserve.runtime.step import Rows
from jaxserve.types import MAX_BAD_WORD_SEQUENCES, MAX_BAD_WORD_TOKENS, MAX_LOGIT_BIAS, SamplingParams
from tests.runtime.shaping_oracle import probabilities, shaped

V = 70  # no multiple of 32
CONFIG = EngineConfig(max_model_len=64, num_pages=9, page_size=8, max_num_seqs=12)
PROMPT, OUTPUT, ENDS = (5, 6, 7, 7, 60), (7, 8, 8, 8, 9, 61), (0, 3)
shape = jax.jit(shaping.shape)
count = jax.jit(shaping.make_count(CONFIG))
admit = jax.jit(shaping.admit)


def params(**fields: Any) -> SamplingParams:
    return SamplingParams(50, **fields)


def some_logits(rows: int, seed: int = 0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal((rows, V)) * 3).astype(np.float32)


def state_of(rows: list[tuple[SamplingParams, History]]) -> Shaping:
    """Slot i has the state of rows[i]."""
    state = zeros(shaping_shapes(CONFIG, V))
    for slot, row in enumerate(rows):
        state = admit(state, np.int32(slot), slot_shaping(*row, V))
    return state


def run_shape(
    state: Shaping, logits: np.ndarray, positions: list[int], is_shaped: list[bool], mask: np.ndarray | None
) -> np.ndarray:
    """Row i is that of slot i. The rest of a batch of all slots, for there to be one program, is padding."""
    n, B = len(logits), CONFIG.max_num_seqs
    padded = np.zeros((B, V), np.float32)
    words = np.full((B, num_words(V)), -1, np.int32)
    slots, at, sampled = np.full(B, B, np.int32), np.zeros(B, np.int32), np.zeros(B, bool)
    flags = np.zeros(B, bool)
    padded[:n], slots[:n], at[:n], flags[:n] = logits, np.arange(n), positions, is_shaped
    if mask is not None:
        words[:n] = mask
    rows = Rows.of(slots, at, sampled)  # type: ignore[arg-type]
    return np.asarray(shape(state, padded, rows, flags, words))[:n]


def shape_alike(
    logits: np.ndarray, rows: list[tuple[SamplingParams, History]], mask: np.ndarray | None = None
) -> np.ndarray:
    """Each row shaped by its own slot."""
    positions = [len(h.prompt_ids) + len(h.output_ids) for _, h in rows]
    return run_shape(state_of(rows), logits, positions, [True] * len(rows), mask)


HISTORY = History(PROMPT, OUTPUT, ENDS)
CASES = {
    "nothing": params(),
    "repetition_penalty": params(repetition_penalty=1.7),
    "repetition_reward": params(repetition_penalty=0.6),
    "presence_penalty": params(presence_penalty=1.5),
    "frequency_penalty": params(frequency_penalty=-0.8),
    "logit_bias": params(logit_bias=((0, 2.5), (7, -100.0), (8, 3.0), (69, 100.0))),
    "allowed_token_ids": params(allowed_token_ids=frozenset((1, 8, 31, 32, 63, 64, 69))),
    "bad_words": params(bad_words=((8, 9, 61, 30), (61, 31), (32,), (9, 61, 9, 33), (8, 61, 34))),
    "min_tokens": params(min_tokens=7),
    "min_tokens_reached": params(min_tokens=6),
    "all": params(
        repetition_penalty=1.3, presence_penalty=0.7, frequency_penalty=0.4, min_tokens=20,
        logit_bias=((7, 4.0), (8, -2.0), (3, 50.0), (40, 1.0)), bad_words=((61, 8), (40,)),
        allowed_token_ids=frozenset(range(3, 66)),
    ),
}  # fmt: skip


def test_each_feature_gives_the_distribution_of_its_definition():
    logits = some_logits(len(CASES))
    got = shape_alike(logits, [(one, HISTORY) for one in CASES.values()])
    changed = {}
    for i, (name, one) in enumerate(CASES.items()):
        wanted = shaped(logits[i], one, PROMPT, OUTPUT, ENDS)
        np.testing.assert_allclose(probabilities(got[i]), probabilities(wanted), 2e-5, 1e-12, err_msg=name)
        finite = np.isfinite(wanted)
        np.testing.assert_allclose(got[i][finite], wanted[finite], 1e-6, 1e-5, err_msg=name)
        assert (got[i][~finite] <= FORBIDDEN).all(), name
        changed[name] = (got[i] != logits[i]).any()
    assert {name for name in changed if not changed[name]} == {"nothing", "min_tokens_reached"}


ids = st.integers(0, V - 1)
few = st.sampled_from((0, 3, 5, 7, 8, 61))  # so that sequences of them do come up in the output
wishes = st.builds(
    params,
    repetition_penalty=st.sampled_from((0.5, 1.0, 1.2, 3.0)),
    presence_penalty=st.sampled_from((-2.0, 0.0, 1.5)),
    frequency_penalty=st.sampled_from((-1.0, 0.0, 0.3)),
    logit_bias=st.dictionaries(ids, st.integers(-100, 100), max_size=5).map(lambda d: tuple(d.items())),
    bad_words=st.lists(st.lists(few, min_size=1, max_size=4).map(tuple), max_size=5).map(tuple),
    min_tokens=st.integers(0, 9),
    allowed_token_ids=st.none() | st.frozensets(ids, min_size=1),
)
prompts = st.lists(ids, min_size=1, max_size=8).map(tuple)
histories = st.builds(History, prompts, st.lists(few, max_size=8).map(tuple), st.just(ENDS))
grammars = st.none() | st.frozensets(ids, min_size=60)


@settings(max_examples=40, derandomize=True)
@given(st.lists(st.tuples(wishes, histories, grammars), min_size=4, max_size=4), st.integers(0, 99))
def test_any_mix_of_features_gives_the_distribution_of_the_definition(rows, seed):
    logits = some_logits(4, seed)
    mask = np.stack([allowed_words(grammar, V).view(np.int32) for _, _, grammar in rows])
    got = shape_alike(logits, [(one, history) for one, history, _ in rows], mask)
    for i, (one, history, grammar) in enumerate(rows):
        wanted = shaped(logits[i], one, history.prompt_ids, history.output_ids, ENDS, grammar)
        if np.isfinite(wanted).any():  # else the grammar and the allowed ids have nothing in common
            np.testing.assert_allclose(probabilities(got[i]), probabilities(wanted), rtol=1e-4, atol=1e-9)


NUM_DRAWS = 1000


@pytest.mark.parametrize("name", [name for name in CASES if name != "nothing"])
def test_draws_follow_the_distribution_that_is_left(name):
    one, temperature = CASES[name], 1.5
    logits = some_logits(1, seed=5)
    logits[0, [0, 3, 7, 8, 31, 32, 60, 61]] = 6.0  # likely, so that it shows what becomes of them
    drawn = draw(np.repeat(shape_alike(logits, [(one, HISTORY)]), NUM_DRAWS, axis=0), temperature)
    share = np.bincount(drawn, minlength=V) / NUM_DRAWS
    p = probabilities(shaped(logits[0], one, PROMPT, OUTPUT, ENDS), temperature)
    assert (share[p == 0] == 0).all()
    np.testing.assert_array_less(np.abs(share - p), 5 * np.sqrt(p * (1 - p) / NUM_DRAWS) + 3 / NUM_DRAWS)
    model = probabilities(logits[0], temperature)
    chance = 5 * np.sqrt(model * (1 - model) / NUM_DRAWS) + 3 / NUM_DRAWS
    assert (np.abs(share - model) > chance).any() == (name != "min_tokens_reached"), "the test has no power"


_sample = jax.jit(sample)


def draw(logits: np.ndarray, temperature: float) -> np.ndarray:
    n = len(logits)
    seeds = np.stack([np.zeros(n), np.arange(n)], axis=1).astype(np.uint32)
    state = SamplingState(
        np.full(n, temperature, np.float32), np.zeros(n, np.int32), np.ones(n, np.float32),
        np.zeros(n, np.float32), seeds,
    )  # type: ignore[arg-type] # fmt: skip
    return np.asarray(_sample(logits, state, np.full(n, 11, np.int32)))


def test_a_row_that_is_not_shaped_keeps_every_bit_whoever_had_its_slot_before():
    logits = some_logits(4)
    logits[1, :3] = np.nan, np.inf, -np.inf
    state = state_of([(CASES["all"], HISTORY)] * 4)
    got = run_shape(state, logits, [11] * 4, [True, False, False, True], None)
    np.testing.assert_array_equal(got[1:3].view(np.int32), logits[1:3].view(np.int32))
    assert (got[[0, 3]] != logits[[0, 3]]).any(axis=1).all()


def test_a_grammars_mask_applies_to_rows_that_are_not_shaped_too():
    mask = np.stack([allowed_words({3, 33, 69}, V), allowed_words(None, V)]).view(np.int32)
    logits = some_logits(2)
    got = run_shape(state_of([]), logits, [11] * 2, [False] * 2, mask)
    np.testing.assert_array_equal(np.flatnonzero(np.isfinite(got[0])), [3, 33, 69])
    np.testing.assert_array_equal(got[0, [3, 33, 69]], logits[0, [3, 33, 69]])
    np.testing.assert_array_equal(got[1], logits[1])


def test_where_only_forbidden_ids_are_allowed_one_of_them_is_picked():
    one = params(allowed_token_ids=frozenset((4, 9)), bad_words=((4,), (61, 9)))
    ended = params(min_tokens=30)
    only_ends = np.stack([allowed_words(None, V), allowed_words(ENDS, V)]).view(np.int32)
    got = shape_alike(some_logits(2), [(one, HISTORY), (ended, HISTORY)], only_ends)
    assert set(np.flatnonzero(probabilities(got[0]))) == {4, 9}
    assert set(np.flatnonzero(probabilities(got[1]))) == set(ENDS)


def test_bias_and_penalties_do_not_bring_back_what_is_not_allowed():
    bias = ((7, 100.0), (2, -100.0))
    one = params(allowed_token_ids=frozenset((1, 2)), logit_bias=bias, presence_penalty=-2)
    (got,) = shape_alike(some_logits(1), [(one, HISTORY)])
    assert set(np.flatnonzero(np.isfinite(got))) == {1, 2}


def rows_of_slots(sampled: list[bool]) -> Rows:
    n = len(sampled)
    return Rows.of(np.arange(n, dtype=np.int32), np.zeros(n, np.int32), np.array(sampled))  # type: ignore[arg-type]


@settings(max_examples=15, derandomize=True)
@given(st.lists(st.lists(few, min_size=3, max_size=3), min_size=1, max_size=25))
def test_counting_ids_as_they_come_is_like_being_admitted_with_all_of_them(steps):
    histories = [History(PROMPT, OUTPUT[: 3 * slot], ENDS) for slot in range(3)]
    one = CASES["all"]
    state = state_of([(one, history) for history in histories])
    at = rows_of_slots([True, False, True])
    for sampled in steps:
        state = count(state, at, np.array(sampled, np.int32))
    for slot, history in enumerate(histories):
        more = tuple(sampled[slot] for sampled in steps) if slot != 1 else ()  # row 1 yields no tokens
        output = history.output_ids + more
        for now, wanted in zip(state, slot_shaping(one, History(PROMPT, output, ENDS), V)):
            np.testing.assert_array_equal(np.asarray(now)[slot], wanted)


def test_a_token_that_comes_more_often_than_can_be_counted_counts_as_often_as_can_be():
    history = History((7,), (7,) * (MAX_COUNT + 10), ())
    state = state_of([(params(frequency_penalty=0.5), history)])
    assert np.asarray(state.seen)[0, 7] == IN_PROMPT + MAX_COUNT
    state = count(state, rows_of_slots([True, False, False]), np.array([7, 7, 7], np.int32))
    assert np.asarray(state.seen)[0, 7] == IN_PROMPT + MAX_COUNT
    assert np.asarray(state.seen)[0].sum() == IN_PROMPT + MAX_COUNT


def test_the_stated_limits_are_the_real_ones():
    rng = np.random.default_rng(0)
    word = tuple(rng.integers(0, V, MAX_BAD_WORD_TOKENS).tolist())
    words = ((60, 61),) * (MAX_BAD_WORD_SEQUENCES - 1) + (word,)
    large = 3000
    bias = tuple((int(i), -50.0) for i in rng.permutation(large)[:MAX_LOGIT_BIAS])
    one = params(bad_words=words, logit_bias=bias)
    row = slot_shaping(one, History(PROMPT, word[:-1], ENDS), large)
    state = Shaping(*(np.asarray(x)[None] for x in row))  # type: ignore[arg-type]
    mask = np.full((1, num_words(large)), -1, np.int32)
    logits = np.zeros((1, large), np.float32)
    rows = Rows.of(np.zeros(1, np.int32), np.array([20], np.int32), np.ones(1, bool))  # type: ignore[arg-type]
    got = np.asarray(shape(state, logits, rows, np.ones(1, bool), mask))[0]
    wanted = shaped(logits[0], one, PROMPT, word[:-1])
    np.testing.assert_array_equal(np.where(got == FORBIDDEN, -np.inf, got), wanted)
    assert (wanted == -50).sum() >= MAX_LOGIT_BIAS - 1


def test_the_state_takes_the_memory_that_is_reported():
    state = zeros(shaping_shapes(CONFIG, V))
    assert sum(np.asarray(x).nbytes for x in state) == shaping_bytes(V, CONFIG.max_num_seqs)
    assert shaping_bytes(262_144, 32) < 22e6
