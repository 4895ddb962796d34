"""A Step as one packed int32 array: a single small upload a launch.

A prefill row  slot start query_len sample has_params first_page num_pages | params | end_ids | pages | tokens
A decode row   slot start query_len first_page num_pages is_greedy | pages

Padding rows point at the trash slot with query_len 0. `is_greedy` is of the step, and in all its rows.
"""

from __future__ import annotations

import numpy as np

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.plan import MAX_END_IDS, Row, Step
from jaxserve.runtime.state import ENDED, NUM_PARAMS, pack_params

SLOT, START, QUERY_LEN, SAMPLE, HAS_PARAMS, FIRST_PAGE, NUM_PAGES = range(7)
PREFILL_HEADER = 7
D_SLOT, D_START, D_QUERY_LEN, D_FIRST_PAGE, D_NUM_PAGES, D_IS_GREEDY = range(6)
DECODE_HEADER = 6


def packed_shape(kind: str, batch: int, queries: int, config: EngineConfig) -> tuple[int, int]:
    """Shape of the array that `pack` makes; `queries` of a decode step are its iterations."""
    if kind != "prefill":
        return batch, DECODE_HEADER + config.pages_for(queries)  # so many new pages a row takes at most
    return batch, PREFILL_HEADER + NUM_PARAMS + MAX_END_IDS + config.pages_per_seq + queries


def pack(step: Step, config: EngineConfig, *, is_greedy: bool = False) -> np.ndarray:
    """`step`, padded to its rectangle. A new array each time: the device may read it in place.

    With `is_greedy`, which is for one decode step alone, the forward pass takes each row's likeliest token.
    """
    queries = max(step.queries, step.iterations)  # one of them is 1
    packed = np.zeros(packed_shape(step.kind, step.batch, queries, config), np.int32)
    packed[len(step.rows) :, SLOT] = config.max_num_seqs  # SLOT and D_SLOT are the same column
    if step.kind == "decode":
        packed[:, D_IS_GREEDY] = is_greedy
        if step.rows:
            _fill_decode_rows(packed, step.rows)
    else:
        for out, row in zip(packed, step.rows):
            _fill_prefill_row(out, row, config)
    return packed


def _fill_decode_rows(out: np.ndarray, rows: tuple[Row, ...]) -> None:
    # By column: fewer, longer copies than by row, of which there are many.
    slots, starts, query_lens, _, first_pages, new_pages, *_ = zip(*rows)
    count, most_pages = len(rows), out.shape[1] - DECODE_HEADER
    out[:count, D_SLOT] = slots
    out[:count, D_START] = starts
    out[:count, D_QUERY_LEN] = query_lens
    out[:count, D_FIRST_PAGE] = first_pages
    for n, pages in enumerate(new_pages):
        if pages:
            assert len(pages) <= most_pages, f"{len(pages)} new pages for {query_lens[n]} decoded tokens"
            out[n, D_NUM_PAGES] = len(pages)
            out[n, DECODE_HEADER : DECODE_HEADER + len(pages)] = pages


def _fill_prefill_row(out: np.ndarray, row: Row, config: EngineConfig) -> None:
    assert row.tokens is not None
    out[:PREFILL_HEADER] = (
        row.slot, row.start, row.query_len, row.sample, row.params is not None,
        row.first_page, len(row.new_pages),
    )  # fmt: skip
    at = PREFILL_HEADER
    if row.params is not None:
        out[at : at + NUM_PARAMS] = pack_params(row.params)
        out[at + NUM_PARAMS : at + NUM_PARAMS + MAX_END_IDS] = ENDED
        out[at + NUM_PARAMS : at + NUM_PARAMS + len(row.end_ids)] = row.end_ids
    at += NUM_PARAMS + MAX_END_IDS
    out[at : at + len(row.new_pages)] = row.new_pages
    at += config.pages_per_seq
    out[at : at + row.query_len] = row.tokens
