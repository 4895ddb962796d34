"""Paged attention against a dense softmax in float64 that knows nothing of pages."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.models.decoder import NO_WINDOW
from jaxserve.ops.attention.reference import BLOCK_TOKENS
from jaxserve.ops.backend import XLA, Backend
from jaxserve.ops.paging import head_scales, quantise_heads

GARBAGE = 2**31 - 1  # a page id that would be far outside of any pool


@functools.cache
def compiled(backend: Backend) -> Callable[..., jax.Array]:
    """One jitted function a backend: the same shapes are compiled once."""
    return jax.jit(backend.attention, static_argnames=("page_size", "scale"))


@dataclass(frozen=True)
class Sequence:
    """All queries, keys and values of one sequence, [T, heads, D]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray

    @classmethod
    def random(cls, rng: np.random.Generator, length: int, heads: int, kv_heads: int, dim: int) -> Sequence:
        # Queries of some size, so that the softmax has sharp rows as well as flat ones.
        shapes = ((length, heads, dim), (length, kv_heads, dim), (length, kv_heads, dim))
        q, k, v = (rng.standard_normal(shape).astype(np.float32) for shape in shapes)
        return cls(q * rng.uniform(0.2, 3, (length, 1, 1)).astype(np.float32), k, v)

    def attend(self, start: int, stop: int, window: int, scale: float) -> np.ndarray:
        """Answers of queries [start, stop) over the keys up to each of them: [stop - start, N, D]."""
        q, k, v = (x.astype(np.float64) for x in (self.q, self.k, self.v))
        group = q.shape[1] // k.shape[1]
        out = np.zeros((stop - start, *q.shape[1:]))
        for i in range(start, stop):
            seen = slice(max(0, i - window + 1), i + 1)
            for head in range(q.shape[1]):
                scores = k[seen, head // group] @ q[i, head] * scale
                weights = np.exp(scores - scores.max())
                out[i - start, head] = weights @ v[seen, head // group] / weights.sum()
        return out


@dataclass
class Pool:
    """Pages of keys and values filled from sequences; what no sequence wrote is NaN, the trash page too."""

    page_size: int
    num_pages: int
    kv_heads: int
    dim: int
    seed: int = 0
    num_layers: int = 2
    layer: int = 1
    keys: np.ndarray = field(init=False)
    values: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        shape = (self.num_layers, self.num_pages * self.page_size, self.kv_heads, self.dim)
        self.keys, self.values = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
        self._free = list(np.random.default_rng(self.seed).permutation(np.arange(1, self.num_pages)))

    def put(self, sequence: Sequence, length: int, first: int = 0) -> list[int]:
        """The page ids for positions [0, length) of `sequence`, in an arbitrary order of the pool. Positions
        before `first` are not written."""
        pages = [int(self._free.pop()) for _ in range(-(-length // self.page_size))]
        for position in range(first, length):
            at = pages[position // self.page_size] * self.page_size + position % self.page_size
            self.keys[self.layer, at] = sequence.k[position]
            self.values[self.layer, at] = sequence.v[position]
        return pages


def run(
    backend: Backend, pool: Pool, rows: list[tuple[Sequence, int, int]], window: int, scale: float,
    *, queries: int | None = None, columns: int | None = None, is_int8: bool = False,
) -> np.ndarray:  # fmt: skip
    """Queries [start, stop) of each (sequence, start, stop) as one batch [B, Q]; start == stop is empty.

    Where the cache held what slid out of the window of all queries there is NaN.
    """
    B = len(rows)
    Q = queries or max([1, *(stop - start for _, start, stop in rows)])
    tables = [
        pool.put(sequence, stop, max(0, start - window + 1)) if stop > start else []
        for sequence, start, stop in rows
    ]
    P = columns or max([1, *map(len, tables)]) + 2
    heads = rows[0][0].q.shape[1]
    q = np.full((B, Q, heads, pool.dim), 7.0, np.float32)
    page_table = np.full((B, P), GARBAGE, np.int32)
    page_table[:, 1::2] = -3
    context_lens, query_lens = np.zeros(B, np.int32), np.zeros(B, np.int32)
    for b, (sequence, start, stop) in enumerate(rows):
        q[b, : stop - start] = sequence.q[start:stop]
        page_table[b, : len(tables[b])] = tables[b]
        context_lens[b], query_lens[b] = (stop, stop - start) if stop > start else (0, 0)
    pools = (pool.keys, pool.values)
    if is_int8:
        pools = tuple(np.asarray(quantise_heads(jnp.asarray(x))) for x in pools)
    arrays = (q, *pools, np.int32(pool.layer), np.int32(window))
    arrays += (page_table, context_lens, query_lens)
    return np.asarray(compiled(backend)(*arrays, page_size=pool.page_size, scale=scale))


def check(
    backend: Backend, rows: list[tuple[Sequence, int, int]], page_size: int, window: int = NO_WINDOW,
    **shape: int,
) -> None:  # fmt: skip
    """One batch against the oracle, padding included."""
    kv_heads, dim = rows[0][0].k.shape[1:]
    num_pages = 1 + 1600 // page_size
    scale = dim**-0.5
    out = run(backend, Pool(page_size, num_pages, kv_heads, dim), rows, window, scale, **shape)
    for b, (sequence, start, stop) in enumerate(rows):
        wanted = sequence.attend(start, stop, window, scale)
        np.testing.assert_allclose(out[b, : stop - start], wanted, rtol=0, atol=2e-5)
        assert not out[b, stop - start :].any(), "padding queries return 0"


def some_rows(
    spans: list[tuple[int, int]], *, heads: int = 4, kv_heads: int = 2, dim: int = 16, seed: int = 0
) -> list[tuple[Sequence, int, int]]:
    rng = np.random.default_rng(seed)
    return [
        (Sequence.random(rng, max(stop, 1), heads, kv_heads, dim), start, stop) for start, stop in spans
    ]


DECODE = [(0, 1), (4, 5), (63, 64), (64, 65), (127, 128), (128, 129), (299, 300)]
MIXED = [(0, 40), (9, 9), (100, 133), (16, 17), (150, 200), (0, 0)]
FAR = [(290, 300), (299, 300), (0, 0), (250, 260)]  # no row sees the first keys through a narrow window


@pytest.mark.parametrize(
    ("spans", "heads", "kv_heads"), [(MIXED, 4, 4), (MIXED, 6, 1), (MIXED, 9, 3), (DECODE, 9, 3)]
)
def test_heads_share_keys_in_groups_of_any_size(backend, spans, heads, kv_heads):
    check(backend, some_rows(spans, heads=heads, kv_heads=kv_heads), page_size=16)


@pytest.mark.parametrize(
    ("spans", "page_size"), [(MIXED, 1), (MIXED, 3), (MIXED, 128), (MIXED, 200), (DECODE, 1), (DECODE, 200)]
)
def test_the_answer_does_not_depend_on_the_page_size(backend, spans, page_size):
    check(backend, some_rows(spans), page_size)


@pytest.mark.parametrize("window", [17, NO_WINDOW])
def test_a_pool_of_int8_holds_keys_and_values_times_their_scales(backend, window):
    rows = some_rows(MIXED)
    out = run(backend, Pool(16, 101, 2, 16), rows, window, 0.25, is_int8=True)
    for b, (sequence, start, stop) in enumerate(rows):
        heads = [np.asarray(quantise_heads(jnp.asarray(x))) for x in (sequence.k, sequence.v)]
        kept = [(x[..., :16] * np.asarray(head_scales(x))[..., None]).astype(np.float32) for x in heads]
        wanted = Sequence(sequence.q, *kept).attend(start, stop, window, 0.25)
        np.testing.assert_allclose(out[b, : stop - start], wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize("spans", [DECODE, MIXED, FAR], ids=["decode", "mixed", "far"])
@pytest.mark.parametrize("window", [1, 2, 17, 128, 129, 1000])
def test_a_window_hides_all_keys_but_the_last(backend, spans, window):
    check(backend, some_rows(spans), page_size=16, window=window)


@settings(max_examples=40, derandomize=True)
@given(data=st.data())
def test_random_batches_equal_dense_attention(data):
    page_size = data.draw(st.sampled_from([4, 16]))
    lengths = data.draw(st.lists(st.integers(0, 2 * BLOCK_TOKENS + 9), min_size=4, max_size=4))
    spans = [(data.draw(st.integers(max(0, n - 30), n)), n) for n in lengths]
    window = data.draw(st.sampled_from([1, 5, 130, NO_WINDOW]))
    rows = some_rows(spans, seed=data.draw(st.integers(0, 99)))
    check(XLA, rows, page_size, window, queries=30, columns=70)


@pytest.mark.parametrize("window", [NO_WINDOW, 50])
def test_chunks_and_single_tokens_equal_one_prefill(backend, window):
    (sequence, _, _), = some_rows([(0, 200)])
    scale = 0.25

    def parts(ends: list[int]) -> np.ndarray:
        out = []
        for start, stop in zip([0, *ends], ends):
            pool = Pool(16, 20, 2, 16, seed=stop)
            out.append(run(backend, pool, [(sequence, start, stop)], window, scale, queries=64, columns=14))
        return np.concatenate([o[0, : stop - start] for o, start, stop in zip(out, [0, *ends], ends)])

    whole = run(backend, Pool(16, 20, 2, 16), [(sequence, 0, 200)], window, scale)[0]
    np.testing.assert_allclose(parts([64, 65, 100, 163, 200]), whole, rtol=0, atol=2e-5)
    np.testing.assert_allclose(parts([*range(1, 12)]), whole[:11], rtol=0, atol=2e-5)
    np.testing.assert_allclose(parts([64, 128, 192, *range(193, 201)]), whole, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("spans", "window", "blocks"),
    [
        ([(0, 1), (4, 5)], NO_WINDOW, 1),
        ([(0, 1), (299, 300)], NO_WINDOW, 3),
        ([(0, 0), (127, 128)], NO_WINDOW, 1),
        ([(0, 0), (128, 129)], NO_WINDOW, 2),
        ([(298, 299), (299, 300)], 20, 1),
        ([(0, 0), (0, 0)], NO_WINDOW, 0),
    ],
)
def test_blocks_of_keys_are_read_up_to_the_longest_live_context_alone(monkeypatch, spans, window, blocks):
    rounds = []

    def counted(lower: jax.Array, upper: jax.Array, body: object, carry: object) -> object:
        rounds.append(int(upper) - int(lower))
        return carry

    monkeypatch.setattr(jax.lax, "fori_loop", counted)
    monkeypatch.setattr(sys.modules[__name__], "compiled", lambda backend: backend.attention)
    run(XLA, Pool(16, 60, 2, 16), some_rows(spans), window, 1.0, columns=4096)
    assert rounds == [blocks]


def test_a_row_does_not_see_its_batch_mates(backend):
    rows = some_rows(MIXED)
    scale = 0.25
    together = run(backend, Pool(16, 60, 2, 16), rows, NO_WINDOW, scale, queries=50, columns=15)
    for b, row in enumerate(rows):
        alone = run(backend, Pool(16, 60, 2, 16, seed=b), [row], NO_WINDOW, scale, queries=50, columns=15)
        np.testing.assert_allclose(alone[0], together[b], rtol=0, atol=2e-6)


def test_only_the_asked_layer_is_read(backend):
    rows = some_rows(DECODE)
    scale = 0.25
    first = Pool(16, 80, 2, 16, num_layers=3, layer=0)
    last = replace(first, layer=2)
    np.testing.assert_array_equal(
        run(backend, first, rows, NO_WINDOW, scale), run(backend, last, rows, NO_WINDOW, scale)
    )


def test_a_batch_of_empty_rows_returns_zeros(backend):
    out = run(backend, Pool(16, 4, 2, 16), some_rows([(0, 0), (5, 5)]), NO_WINDOW, 1.0, queries=3)
    assert out.shape == (2, 3, 4, 16)
    assert not out.any()


def test_bfloat16_keeps_its_type_and_stays_near_the_float64_answer(backend):
    (sequence, _, _), = some_rows([(0, 300)])
    pool = Pool(16, 20, 2, 16)
    table = pool.put(sequence, 300)
    sequence = Sequence(*(np.asarray(jnp.asarray(x, jnp.bfloat16), np.float32) for x in
                          (sequence.q, sequence.k, sequence.v)))  # fmt: skip
    out = compiled(backend)(
        jnp.asarray(sequence.q[None, 280:], jnp.bfloat16),
        jnp.asarray(pool.keys, jnp.bfloat16), jnp.asarray(pool.values, jnp.bfloat16),
        jnp.int32(1), jnp.int32(NO_WINDOW), jnp.asarray([table], jnp.int32),
        jnp.asarray([300], jnp.int32), jnp.asarray([20], jnp.int32),
        page_size=16, scale=0.25,
    )  # fmt: skip
    assert out.dtype == jnp.bfloat16
    wanted = sequence.attend(280, 300, NO_WINDOW, 0.25)
    np.testing.assert_allclose(np.asarray(out[0], np.float32), wanted, rtol=0, atol=0.03)
