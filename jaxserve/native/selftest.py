"""Compares the compiled kernels with plain NumPy on a few small shapes, so that a wrong one is never used."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.native.ops import linear, linear_packed, pack, paged_attention

TOLERANCE = 1e-4  # float32 sums, relative to the largest value
FIXED_TOLERANCE = 1e-3  # of bfloat16 weights packed to 16-bit integers


class WrongKernel(RuntimeError):
    """A compiled kernel disagrees with NumPy on this machine."""


def self_test() -> None:
    """Runs each kernel on small inputs. Raises WrongKernel with the case and the error."""
    rng = np.random.default_rng(0)
    with jax.ensure_compile_time_eval(), jax.default_device(jax.local_devices(backend="cpu")[0]):
        for rows in (1, 3, 9):
            for dtype in (jnp.bfloat16, jnp.float32):
                x = jnp.asarray(rng.standard_normal((rows, 88)), dtype)
                w = jnp.asarray(rng.standard_normal((37, 88)), dtype)
                got = linear(x, w, out_dtype=jnp.float32)
                stacked = linear(x, jnp.stack([w * 0, w]), jnp.int32(1), out_dtype=jnp.float32)
                case = f"linear with {rows} rows of {jnp.dtype(dtype).name}"
                _compare(case, got, _float64(x) @ _float64(w).T)
                _compare(f"{case}, second layer", stacked, _float64(got))
                w = jnp.asarray(rng.standard_normal((2, 48, 80)), dtype)
                packed = linear_packed(x[:, :80], pack(w), jnp.int32(1), out_dtype=jnp.float32)
                limit = FIXED_TOLERANCE if dtype == jnp.bfloat16 else TOLERANCE
                _compare(f"packed {case}", packed, _float64(x[:, :80]) @ _float64(w[1]).T, limit)
        for window, soft_cap in ((None, None), (40, 20.0)):
            _check_attention(rng, window, soft_cap)


def _check_attention(rng: np.random.Generator, window: int | None, soft_cap: float | None) -> None:
    heads, kv_heads, dim, page_size = 4, 2, 32, 16
    context_lens, query_lens = np.array([75, 0, 130], np.int32), np.array([1, 0, 7], np.int32)
    table = rng.permutation(30).reshape(3, 10).astype(np.int32)
    q = jnp.asarray(rng.standard_normal((3, 8, heads, dim)), jnp.float32)
    k, v = (jnp.asarray(rng.standard_normal((30 * page_size, kv_heads, dim)), jnp.bfloat16) for _ in range(2))
    attend = functools.partial(
        paged_attention,
        q,
        page_table=jnp.asarray(table),
        context_lens=jnp.asarray(context_lens),
        query_lens=jnp.asarray(query_lens),
        page_size=page_size,
        scale=0.25,
        window=window,
        soft_cap=soft_cap,
    )
    got = attend(k, v)
    stacked = attend(jnp.stack([k * 0, k]), jnp.stack([v * 0, v]), layer=jnp.int32(1))
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
                p = np.exp(s - s.max())
                want[b, i, h] = p @ _float64(v)[seen, head] / p.sum()
    case = f"paged_attention with window {window} and soft cap {soft_cap}"
    _compare(case, got, want)
    _compare(f"{case}, second layer", stacked, _float64(got))


def _float64(x: jax.Array) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _compare(case: str, got: jax.Array, want: np.ndarray, limit: float = TOLERANCE) -> None:
    error = float(np.abs(_float64(got) - want).max() / np.abs(want).max())
    if not error <= limit:
        raise WrongKernel(f"the C++ {case} is off by {error:.2g} of the largest value; limit {limit}")
