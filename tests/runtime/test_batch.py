"""The packed array of a step, read back column by column."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.plan import MAX_END_IDS, Row, Step
from jaxserve.runtime.batch import pack, packed_shape
from jaxserve.runtime.state import ENDED, NUM_PARAMS, pack_params
from jaxserve.types import SamplingParams

CONFIG = EngineConfig(max_model_len=50, num_pages=99, page_size=8, max_num_seqs=6, max_prefill_tokens=64)
P = CONFIG.pages_per_seq

ids = st.integers(0, 2**31 - 1)
params = st.builds(
    SamplingParams, st.integers(1, 9), st.floats(0, 2, width=32), st.integers(0, 2**31 - 1),
    st.floats(0, 1, width=32), st.floats(0, 1, width=32), st.integers(-(2**63), 2**64 - 1),
)  # fmt: skip


# (slot, start, first_page, page or None)
decode_rows = st.tuples(
    st.integers(0, 5), st.integers(0, 49), st.integers(0, P - 1), st.none() | st.integers(1, 98)
)


@st.composite
def prefill_steps(draw: st.DrawFn) -> Step:
    B, Q = draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from([4, 16]))
    slots = draw(st.lists(st.integers(0, 5), max_size=B, unique=True))
    rows = []
    for slot in slots:
        tokens = tuple(draw(st.lists(ids, min_size=1, max_size=Q)))
        first = draw(st.integers(0, P))
        pages = tuple(draw(st.lists(st.integers(1, 98), max_size=P - first)))
        given_params = draw(st.none() | params)
        end_ids = tuple(draw(st.lists(ids, max_size=MAX_END_IDS))) if given_params else ()
        start = draw(st.integers(0, 40))
        rows.append(
            Row(slot, start, len(tokens), tokens, first, pages, draw(st.booleans()), given_params, end_ids)
        )
    return Step("prefill", B, Q, tuple(rows))


@settings(max_examples=60, derandomize=True)
@given(prefill_steps())
def test_a_prefill_row_holds_header_parameters_pages_and_tokens(step):
    packed = pack(step, CONFIG)
    assert packed.dtype == np.int32
    assert packed.shape == packed_shape("prefill", step.batch, step.queries, CONFIG)
    for row, line in zip(step.rows, packed.tolist()):
        header, line = line[:7], line[7:]
        assert header == [
            row.slot, row.start, row.query_len, row.sample, row.params is not None, row.first_page,
            len(row.new_pages),
        ]  # fmt: skip
        wanted = [0] * NUM_PARAMS if row.params is None else pack_params(row.params).tolist()
        assert line[:NUM_PARAMS] == wanted
        line = line[NUM_PARAMS:]
        end_ids, line = line[:MAX_END_IDS], line[MAX_END_IDS:]
        if row.params is not None:
            assert end_ids == [*row.end_ids, *[ENDED] * (MAX_END_IDS - len(row.end_ids))]
        pages, tokens = line[:P], line[P:]
        assert tuple(pages[: len(row.new_pages)]) == row.new_pages
        assert tuple(tokens[: row.query_len]) == row.tokens
        assert len(tokens) == step.queries
    for line in packed[len(step.rows) :].tolist():
        assert line == [CONFIG.max_num_seqs, *[0] * (len(line) - 1)]


@settings(max_examples=60, derandomize=True)
@given(
    st.sampled_from([2, 6]),
    st.lists(decode_rows, max_size=6, unique_by=lambda row: row[0]),
    st.booleans(),
)
def test_a_decode_row_holds_its_slot_position_and_at_most_one_page(batch, described, is_greedy):
    rows = tuple(
        Row(slot, start, 1, None, first, () if page is None else (page,), True, None)
        for slot, start, first, page in described[:batch]
    )
    packed = pack(Step("decode", batch, 1, rows), CONFIG, is_greedy=is_greedy)
    assert packed.dtype == np.int32
    assert packed.shape == packed_shape("decode", batch, 1, CONFIG)
    wanted = [
        [slot, start, 1, first, int(page is not None), is_greedy, page or 0]
        for slot, start, first, page in described[:batch]
    ]
    padding = [[CONFIG.max_num_seqs, 0, 0, 0, 0, is_greedy, 0]] * (batch - len(rows))
    assert packed.tolist() == wanted + padding


def test_every_call_makes_an_array_of_its_own():
    step = Step("decode", 2, 1, (Row(0, 3, 1, None, 0, (), True, None),))
    one, other = pack(step, CONFIG), pack(step, CONFIG)
    assert not np.shares_memory(one, other)


def test_a_row_of_several_decode_steps_has_room_for_the_pages_of_all_of_them():
    for iterations, num_pages in ((2, 1), (8, 1), (9, 2), (17, 3)):
        row = Row(1, 3, iterations, None, 0, tuple(range(5, 5 + num_pages)), True, None)
        packed = pack(Step("decode", 2, 1, (row,), iterations), CONFIG)
        assert packed.shape == packed_shape("decode", 2, iterations, CONFIG)
        assert packed[0].tolist() == [1, 3, iterations, 0, num_pages, 0, *row.new_pages]
        assert packed[1].tolist() == [CONFIG.max_num_seqs, *[0] * (5 + num_pages)]


def test_a_decode_row_of_two_pages_is_our_own_mistake():
    with pytest.raises(AssertionError, match="2 new pages for 1 decoded tokens"):
        pack(Step("decode", 2, 1, (Row(0, 3, 1, None, 0, (4, 5), True, None),)), CONFIG)
