"""Paged attention against dense float64 attention over the keys gathered one sequence at a time."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import native
from jaxserve.ops.paging import head_scales, quantise_heads

BF16, F32 = jnp.bfloat16, jnp.float32


@dataclasses.dataclass
class Case:
    """One call of the kernel; page tables are random, and what no row may read is NaN."""

    context_lens: list[int]
    query_lens: list[int]
    heads: int = 6
    kv_heads: int = 2
    dim: int = 64
    page_size: int = 16
    window: int | None = None
    soft_cap: float | None = None
    dtype: jnp.dtype = F32
    kv_dtype: jnp.dtype = BF16
    has_sinks: bool = False

    def __post_init__(self) -> None:
        rng = np.random.default_rng([self.heads, self.dim, self.page_size, *self.context_lens])
        self.scale = self.dim**-0.5
        rows, queries = len(self.context_lens), max([1, *self.query_lens])
        pages = [-(-n // self.page_size) for n in self.context_lens]
        width = max(pages) + 2
        free = rng.permutation(sum(pages) + 3)
        self.table = rng.integers(-(2**31), 2**31, (rows, width)).astype(np.int32)  # garbage past the context
        shape = (len(free) * self.page_size, self.kv_heads, self.dim)
        keys, values = np.full(shape, np.nan, np.float32), np.full(shape, np.nan, np.float32)
        taken = 0
        self.slots = []
        for row, (count, length) in enumerate(zip(pages, self.context_lens, strict=True)):
            self.table[row, :count] = free[taken : taken + count]
            taken += count
            slots = self.table[row, :count, None] * self.page_size + np.arange(self.page_size)
            slots = slots.ravel()[:length]
            seen = slots[max(0, length - self.query_lens[row] - self.window + 1) if self.window else 0 :]
            keys[seen] = rng.standard_normal((len(seen), self.kv_heads, self.dim)) * 2
            values[seen] = rng.standard_normal((len(seen), self.kv_heads, self.dim))
            self.slots.append(slots)
        if self.kv_dtype == jnp.int8:
            self.k, self.v = (quantise_heads(jnp.asarray(x)) for x in (keys, values))
        else:
            self.k, self.v = jnp.asarray(keys, self.kv_dtype), jnp.asarray(values, self.kv_dtype)
        self.sinks = jnp.asarray(rng.standard_normal(self.heads) * 4, jnp.float32) if self.has_sinks else None
        self.q = jnp.asarray(rng.standard_normal((rows, queries, self.heads, self.dim)), self.dtype)

    def run(self, rows: slice = slice(None)) -> np.ndarray:
        return np.asarray(
            native.paged_attention(
                self.q[rows],
                self.k,
                self.v,
                jnp.asarray(self.table[rows]),
                jnp.asarray(self.context_lens[rows], jnp.int32),
                jnp.asarray(self.query_lens[rows], jnp.int32),
                page_size=self.page_size,
                scale=self.scale,
                window=self.window,
                soft_cap=self.soft_cap,
                sinks=self.sinks,
            ),
            np.float32,
        )

    def dense(self) -> np.ndarray:
        q = np.asarray(self.q).astype(np.float64)
        k, v = (np.asarray(dequantised(x)).astype(np.float64) for x in (self.k, self.v))
        v = np.nan_to_num(v)  # slots that no query sees
        out = np.zeros(q.shape)
        for row, (length, count) in enumerate(zip(self.context_lens, self.query_lens, strict=True)):
            if not count:
                continue
            at = np.arange(length - count, length)[:, None]
            key = np.arange(length)[None]
            seen = (key <= at) & (key > at - (self.window or length))
            for head in range(self.heads):
                kv = head // (self.heads // self.kv_heads)
                s = q[row, :count, head] @ k[self.slots[row], kv].T * self.scale
                if self.soft_cap:
                    s = self.soft_cap * np.tanh(s / self.soft_cap)
                s = np.where(seen, s, -np.inf)  # also for NaN keys
                most = s.max(axis=1, keepdims=True)
                p = np.exp(s - most)
                total = p.sum(axis=1, keepdims=True)
                if self.sinks is not None:
                    total += np.exp(float(self.sinks[head]) - most)
                out[row, :count, head] = p @ v[self.slots[row], kv] / total
        return out

    def check(self, tolerance: float = 2e-5) -> None:
        np.testing.assert_allclose(self.run(), self.dense(), rtol=0, atol=tolerance)


DECODE = {"context_lens": [1, 5, 64, 65, 136, 513, 1100], "query_lens": [1] * 7}
MIXED = {"context_lens": [40, 0, 200, 17, 600, 90], "query_lens": [40, 0, 33, 1, 70, 0]}


@pytest.mark.parametrize("step", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 1, 256), (2, 2, 128), (6, 1, 16), (4, 2, 48), (14, 2, 32)]
)
def test_attention_equals_dense_attention_for_every_head_layout(isa, step, heads, kv_heads, dim):
    Case(**step, heads=heads, kv_heads=kv_heads, dim=dim).check()


def dequantised(pool: jax.Array) -> jax.Array:
    """The floats of an int8 pool; another as it is."""
    return pool[..., :-4] * head_scales(pool)[..., None] if pool.dtype == jnp.int8 else pool


@pytest.mark.parametrize("step", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 1, 256), (14, 2, 48)])
def test_pages_of_int8_are_what_their_scales_make_of_them(isa, step, heads, kv_heads, dim):
    Case(**step, heads=heads, kv_heads=kv_heads, dim=dim, kv_dtype=jnp.int8, window=90).check()


@pytest.mark.parametrize("step", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_a_sink_takes_its_part_of_the_weights_and_gives_nothing(isa, step, soft_cap):
    Case(**step, heads=6, kv_heads=2, has_sinks=True, soft_cap=soft_cap).check()


@pytest.mark.parametrize("step", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("page_size", [1, 16, 48, 64, 100])
def test_attention_equals_dense_attention_for_every_page_size(isa, step, page_size):
    Case(**step, page_size=page_size).check()


@pytest.mark.parametrize("step", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("window", [1, 7, 64, 100, 512, 5000])
def test_a_query_with_a_window_sees_only_the_last_keys(isa, step, window):
    Case(**step, window=window).check()


@pytest.mark.parametrize("step", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("soft_cap", [0.5, 30.0])
def test_a_soft_cap_bounds_the_scores(isa, step, soft_cap):
    Case(**step, soft_cap=soft_cap, window=90).check()


@pytest.mark.parametrize("kv_dtype", [BF16, F32])
@pytest.mark.parametrize("dtype", [BF16, F32])
def test_queries_and_cache_may_each_be_bfloat16_or_float32(isa, dtype, kv_dtype):
    case = Case(**MIXED, dtype=dtype, kv_dtype=kv_dtype)
    case.check(2e-5 if dtype == F32 else 2e-2)
    if dtype == BF16:
        exact = dataclasses.replace(case, dtype=F32)
        exact.q = case.q.astype(F32)
        np.testing.assert_array_equal(case.run(), np.asarray(jnp.asarray(exact.run(), BF16), np.float32))


def test_padding_queries_and_empty_rows_return_exact_zeros(isa):
    case = Case(**MIXED)
    out = case.run()
    for row, count in enumerate(case.query_lens):
        assert not out[row, count:].any()


@pytest.mark.parametrize("step", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("kv_dtype", [BF16, jnp.int8])
def test_the_bits_of_a_row_do_not_depend_on_the_other_rows(isa, step, window, kv_dtype):
    case = Case(**step, window=window, kv_heads=1, kv_dtype=kv_dtype)
    together = case.run()
    for row in range(len(case.context_lens)):
        np.testing.assert_array_equal(case.run(slice(row, row + 1)), together[row : row + 1])


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("kv_dtype", [BF16, jnp.int8])
def test_the_bits_of_a_query_do_not_depend_on_the_chunk_it_comes_in(isa, window, kv_dtype):
    whole = Case([1200], [1200], window=window, kv_heads=1, kv_dtype=kv_dtype)
    at_once = whole.run()
    for start, stop in ((0, 1), (0, 7), (63, 65), (500, 530), (511, 512), (900, 1200), (1199, 1200)):
        part = dataclasses.replace(whole, context_lens=[stop], query_lens=[stop - start])
        part.q, part.k, part.v, part.table = whole.q[:, start:stop], whole.k, whole.v, whole.table
        np.testing.assert_array_equal(part.run(), at_once[:, start:stop])


def test_scores_far_from_zero_do_not_overflow(isa):
    case = Case(**DECODE)
    case.q = case.q * 300
    case.check(1e-3)


def test_attention_runs_compiled_ahead_of_time_over_a_donated_cache(built):
    case = Case([70, 33], [1, 1], dtype=F32, kv_dtype=F32)
    k, v = (jnp.nan_to_num(x) for x in (case.k, case.v))

    def step(q, k, v, table, context_lens, query_lens):
        slots = jnp.asarray([case.slots[0][-1], case.slots[1][-1]])
        k = k.at[slots].set(q[:, 0, : case.kv_heads])
        v = v.at[slots].set(2.0 * q[:, 0, : case.kv_heads])
        out = native.paged_attention(
            q, k, v, table, context_lens, query_lens, page_size=case.page_size, scale=case.scale
        )
        return out, k, v

    lens = [jnp.asarray(x, jnp.int32) for x in (case.context_lens, case.query_lens)]
    args = (case.q, k, v, jnp.asarray(case.table), *lens)
    out, case.k, case.v = jax.jit(step, donate_argnums=(1, 2)).lower(*args).compile()(*args)
    assert k.is_deleted()
    assert np.asarray(case.k)[case.slots[0][-1]].any()
    np.testing.assert_allclose(out, case.dense(), atol=2e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_size": 7}, "48 slots are not a whole number of pages of 7"),
        ({"window": 0}, "window 0"),
        ({"soft_cap": -1.0}, "soft_cap -1.0"),
    ],
)
def test_arguments_that_do_not_fit_are_named(built, change, message):
    q, pages, lens = jnp.ones((1, 1, 2, 16)), jnp.ones((48, 1, 16)), jnp.ones(1, jnp.int32)
    arguments = {"page_size": 16, "scale": 1.0, **change}
    with pytest.raises(ValueError, match=message):
        native.paged_attention(q, pages, pages, jnp.zeros((1, 3), jnp.int32), lens, lens, **arguments)


@pytest.mark.parametrize(
    ("q", "pages", "message"),
    [
        (jnp.ones((1, 1, 2, 24)), jnp.ones((48, 1, 24)), "head size of 16"),
        (jnp.ones((1, 1, 3, 16)), jnp.ones((48, 2, 16)), "multiple of the kv heads"),
        (jnp.ones((1, 1, 2, 16)), jnp.ones((48, 1, 32)), "must be"),
        (jnp.ones((1, 1, 2, 16)), jnp.ones((48, 1, 16), jnp.float16), "float16"),
    ],
)
def test_shapes_and_dtypes_that_do_not_fit_are_named(built, q, pages, message):
    lens = jnp.ones(1, jnp.int32)
    with pytest.raises(ValueError, match=message):
        native.paged_attention(
            q, pages, pages, jnp.zeros((1, 3), jnp.int32), lens, lens, page_size=16, scale=1.0
        )
