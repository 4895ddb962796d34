"""Compares the compiled kernels with plain NumPy on a few small shapes, so that a wrong one is never used."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.native.ops import (
    SCALE_BYTES,
    gate,
    linear,
    linear_int8,
    linear_packed,
    pack,
    pack_int8,
    paged_attention,
    write_rows,
)

TOLERANCE = 1e-4  # float32 sums, relative to the largest value
FIXED_TOLERANCE = 1e-3  # of bfloat16 weights packed to 16-bit integers


class WrongKernel(RuntimeError):
    """A compiled kernel disagrees with NumPy on this machine."""


class Case(NamedTuple):
    """One call of a kernel, and what it must give."""

    name: str
    run: Callable[..., jax.Array]
    inputs: tuple[np.ndarray | np.int32, ...]
    want: np.ndarray
    limit: float = TOLERANCE


def self_test() -> None:
    """Runs each kernel on small inputs. Raises WrongKernel with the case and the error."""
    rng = np.random.default_rng(0)
    cases = [*_linear_cases(rng), *_int8_cases(rng), *_small_cases(rng)]
    cases += _attention_cases(rng, None, None, is_int8=False)
    cases += _attention_cases(rng, 40, 20.0, is_int8=False, has_sinks=True)
    cases += _attention_cases(rng, 40, None, is_int8=True)
    # One program for all: compiling each call alone would take longer than everything else at start-up.
    run = jax.jit(lambda inputs: [case.run(*each) for case, each in zip(cases, inputs)])
    with jax.ensure_compile_time_eval(), jax.default_device(jax.local_devices(backend="cpu")[0]):
        results = run([case.inputs for case in cases])
    for case, got in zip(cases, results):
        error = float(np.abs(_float64(got) - case.want).max() / np.abs(case.want).max())
        if not error <= case.limit:
            raise WrongKernel(
                f"the C++ {case.name} is off by {error:.2g} of the largest value; limit {case.limit}"
            )


def _linear_cases(rng: np.random.Generator) -> Iterator[Case]:
    def normal(dtype: np.dtype, *shape: int) -> np.ndarray:
        return rng.standard_normal(shape).astype(dtype)

    second = np.int32(1)
    for rows in (1, 3, 9):
        for dtype in (np.dtype(jnp.bfloat16), np.dtype(np.float32)):
            name = f"linear with {rows} rows of {dtype.name}"
            x, w = normal(dtype, rows, 88), normal(dtype, 2, 37, 88)
            want = _float64(x) @ _float64(w[1]).T
            yield Case(name, partial(linear, out_dtype=jnp.float32), (x, w[1]), want)
            yield Case(f"{name}, second layer", partial(linear, out_dtype=jnp.float32), (x, w, second), want)
            x, w = x[:, :80], normal(dtype, 2, 48, 80)
            want = _float64(x) @ _float64(w[1]).T
            limit = FIXED_TOLERANCE if dtype == jnp.bfloat16 else TOLERANCE
            yield Case(f"packed {name}", _packed, (x, w, second), want, limit)


def _int8_cases(rng: np.random.Generator) -> Iterator[Case]:
    # 96: one scale a channel; 27 rows read weights that were widened once for all.
    for rows, group in ((1, 32), (3, 96), (27, 32)):
        x = rng.standard_normal((rows, 96)).astype(np.float32)
        values = rng.integers(-127, 128, (2, 48, 96)).astype(np.int8)
        scales = rng.uniform(0.01, 1, (2, 48, 96 // group)).astype(np.float32)
        want = _float64(x) @ (_float64(values[1]) * np.repeat(_float64(scales[1]), group, axis=1)).T
        name = f"linear_int8 with {rows} rows and groups of {group}"
        yield Case(name, _int8, (x, values, scales, np.int32(1)), want)


def _int8(x: jax.Array, values: jax.Array, scales: jax.Array, layer: jax.Array) -> jax.Array:
    return linear_int8(x, pack_int8(values, scales), layer)


def _packed(x: jax.Array, w: jax.Array, layer: jax.Array) -> jax.Array:
    return linear_packed(x, pack(w), layer, out_dtype=jnp.float32)


def _small_cases(rng: np.random.Generator) -> Iterator[Case]:
    x = rng.standard_normal((3, 46)).astype(np.float32)
    a, up = np.split(_float64(x), 2, axis=1)
    for name, z in (("silu", a), ("gelu_tanh", 2 * math.sqrt(2 / math.pi) * (a + 0.044715 * a**3))):
        yield Case(f"gate by {name}", partial(gate, activation=name), (x,), a / (1 + np.exp(-z)) * up)
    pool = rng.standard_normal((2, 9, 2, 4)).astype(jnp.bfloat16)
    new, at = rng.standard_normal((2, 2, 4)).astype(jnp.bfloat16), np.array([7, 2], np.int32)
    want = pool.copy()
    want[1, at] = new
    yield Case("write_rows", write_rows, (pool, np.int32(1), new, at), _float64(want))
    whole = rng.integers(-127, 128, (2, 2, 16))
    whole[..., 5] = 127
    pool = np.zeros((2, 9, 2, 16 + SCALE_BYTES), np.int8)
    got = pool.copy()
    got[1, at] = _int8_heads(whole, scale := np.array([[0.5, 4.0], [0.25, 1.0]], np.float32))
    new = (whole * scale[..., None]).astype(np.float32)
    yield Case("write_rows to int8", write_rows, (pool, np.int32(1), new, at), _float64(got))


def _attention_cases(
    rng: np.random.Generator, window: int | None, soft_cap: float | None, *, is_int8: bool,
    has_sinks: bool = False,
) -> Iterator[Case]:  # fmt: skip
    heads, kv_heads, dim, page_size = 4, 2, 32, 16
    context_lens, query_lens = np.array([75, 0, 130], np.int32), np.array([1, 0, 7], np.int32)
    table = rng.permutation(30).reshape(3, 10).astype(np.int32)
    q = rng.standard_normal((3, 8, heads, dim)).astype(np.float32)
    pools = rng.standard_normal((2, 2, 30 * page_size, kv_heads, dim)).astype(jnp.bfloat16)
    k, v = pools[:, 1]
    if is_int8:
        whole = rng.integers(-127, 128, pools.shape)
        scales = rng.uniform(0.01, 0.03, pools.shape[:-1]).astype(np.float32)
        pools = _int8_heads(whole, scales)
        k, v = (whole * scales[..., None].astype(np.float64))[:, 1]
    sinks = rng.standard_normal(heads).astype(np.float32) if has_sinks else None
    want = np.zeros(q.shape)
    for b in range(3):
        slots = (table[b, :, None] * page_size + np.arange(page_size)).ravel()[: context_lens[b]]
        for i in range(query_lens[b]):
            position = context_lens[b] - query_lens[b] + i
            seen = slots[max(0, position + 1 - window) if window else 0 : position + 1]
            for h in range(heads):
                head = h // (heads // kv_heads)
                s = _float64(k)[seen, head] @ _float64(q)[b, i, h] * 0.25
                s = soft_cap * np.tanh(s / soft_cap) if soft_cap else s
                p, rest = np.exp(s - s.max()), 0.0 if sinks is None else np.exp(sinks[h] - s.max())
                want[b, i, h] = p @ _float64(v)[seen, head] / (p.sum() + rest)
    attend = partial(
        paged_attention, page_size=page_size, scale=0.25, window=window, soft_cap=soft_cap, sinks=sinks
    )
    name = f"paged_attention with window {window} and soft cap {soft_cap} of {pools.dtype.name}"
    rest = (table, context_lens, query_lens)
    yield Case(name, attend, (q, *pools[:, 1], *rest), want)
    yield Case(f"{name}, second layer", attend, (q, *pools, *rest, np.int32(1)), want)


def _int8_heads(whole: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """What an int8 pool keeps of the heads `whole` [..., D] times `scales` [...]."""
    return np.concatenate([whole.astype(np.int8), scales[..., None].view(np.int8)], axis=-1)


def _float64(x: jax.Array | np.ndarray) -> np.ndarray:
    return np.asarray(x).astype(np.float64)
