"""The kernels as traceable JAX functions, for programs that run on the CPU backend.

They work under jit, ahead-of-time compilation, loops and donation. They have no derivative and no batching
rule: differentiating or vmapping them is JAX's error.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxserve.native.library import (
    GATE,
    LINEAR,
    LINEAR_PACKED,
    PACK,
    PACK_INT8,
    PAGED_ATTENTION,
    WRITE_ROWS,
    ZEROS,
    load,
)

DTYPES = (jnp.bfloat16, jnp.float32)
ACTIVATIONS = ("silu", "gelu_tanh")  # in the order of csrc/types.h
SCALE_WORDS = 2  # int16 that the scale of a packed bfloat16 channel takes
SCALE_BYTES = 4  # that the float32 scale of int8 values takes, a packed group of weights or a head in a pool
INT8_GROUP = 32  # the smallest group of an int8 channel that shares a scale
PACKED_MULTIPLE = 16  # of N and K: what every instruction set's packed order can hold


def linear(
    x: jax.Array,  # [..., K]
    w: jax.Array,  # [N, K], the layout of checkpoints, or [L, N, K]
    layer: jax.Array | None = None,  # [] int32, which of the L
    *,
    out_dtype: DTypeLike | None = None,
) -> jax.Array:  # [..., N]
    """x @ w^T with float32 sums; x and w are bfloat16 or float32, the result has `out_dtype` or x's dtype.

    A row's bits depend on that row and `w` alone, not on the number of rows.
    Raises ValueError for shapes or dtypes that don't fit, NativeUnavailable without the kernels.
    """
    return _linear(LINEAR, x, w, layer, out_dtype)


def linear_packed(
    x: jax.Array,  # [..., K]
    w: jax.Array,  # [L, N, K], from `pack`
    layer: jax.Array,  # [] int32, which of the L
    *,
    out_dtype: DTypeLike | None = None,
) -> jax.Array:  # [..., N]
    """`linear` on packed weights, faster. Errors as `linear`'s.

    Weights that were float32 give `linear`'s bits. Those that were bfloat16 are multiplied in 16-bit fixed
    point (csrc/fixed_kernel.h): an element of x counts to 2^-13 of the largest of its 64 neighbours along K,
    a weight to 2^-14 of the largest of its channel. With AMX (csrc/amx_kernel.h) they and bfloat16 x count
    as they are, float32 x to 2^-16 of itself.
    """
    if w.dtype not in (jnp.float32, jnp.int16):
        raise ValueError(f"linear_packed: w is {w.dtype}, must come from pack()")
    return _linear(LINEAR_PACKED, x, w, layer, out_dtype)


def pack(w: jax.Array) -> jax.Array:
    """`w` [L, N, K] as `linear_packed` reads it: bfloat16 becomes int16 [L, N, K + 2], float32 stays so.

    The int16 are fixed point with a scale or, with AMX, the bits of bfloat16.

    The order depends on the instruction set in use: a packed array is good for this process alone.
    Raises ValueError unless `packable`, NativeUnavailable without the kernels.
    """
    load()
    _check_packable("pack", w)
    layers, channels, k = w.shape
    shape, dtype = w.shape, w.dtype
    if dtype == jnp.bfloat16:
        shape, dtype = (layers, channels, k + SCALE_WORDS), jnp.dtype(jnp.int16)
    return jax.ffi.ffi_call(PACK, jax.ShapeDtypeStruct(shape, dtype))(w)


def packed_rows(w: jax.Array, rows: jax.Array) -> jax.Array:
    """Float32 [..., K]: rows of one matrix, int16 [N, K + 2] from `pack`, with the numbers `rows` [...]."""
    k = w.shape[1] - SCALE_WORDS
    if load().keeps_bfloat16():
        values, _ = _values_and_scales(w, rows, k, k, side=2)
        return jax.lax.bitcast_convert_type(values, jnp.bfloat16).astype(jnp.float32).reshape(*rows.shape, k)
    return _rows(w, rows, k, k, side=2)


def packable(shape: Sequence[int], dtype: DTypeLike) -> bool:
    """Whether `pack` takes an array like this: matrices of all layers, [L, N, K], N and K multiples of 16."""
    multiples = len(shape) == 3 and shape[1] % PACKED_MULTIPLE == 0 and shape[2] % PACKED_MULTIPLE == 0
    return multiples and jnp.dtype(dtype) in DTYPES


def linear_int8(
    x: jax.Array,  # [..., K]
    w: jax.Array,  # [L, N, W], from `pack_int8`
    layer: jax.Array,  # [] int32, which of the L
    *,
    out_dtype: DTypeLike | None = None,
) -> jax.Array:  # [..., N]
    """`linear` on int8 weights with scales, which are taken as they are. Errors as `linear`'s.

    x is multiplied in 16-bit fixed point (csrc/fixed_kernel.h): an element counts to 2^-16 of the largest of
    its 64 neighbours along K. Everything else is float32.
    """
    if w.dtype != jnp.int8:
        raise ValueError(f"linear_int8: w is {w.dtype}, must come from pack_int8()")
    return _linear(LINEAR_PACKED, x, w, layer, out_dtype)


def pack_int8(
    values: jax.Array,  # [L, N, K] int8
    scales: jax.Array,  # [L, N, K / G] float32
) -> jax.Array:  # [L, N, W] int8, W = K + 4 K / G
    """The weights values * scales, with a scale for G elements of a channel, as `linear_int8` reads them.

    The scales stay float32. The order depends on the instruction set in use: a packed array is good for this
    process alone. Raises ValueError unless `packable_int8`, NativeUnavailable without the kernels.
    """
    load()
    fits = (values.dtype, scales.dtype) == (jnp.int8, jnp.float32) and values.shape[:-1] == scales.shape[:-1]
    count = scales.shape[-1] if scales.ndim else 0
    group = values.shape[-1] // count if fits and count else 0
    if not packable_int8(values.shape, group) or group * count != values.shape[-1]:
        raise ValueError(
            f"pack_int8: values {values.dtype}{list(values.shape)} and scales {scales.dtype}"
            f"{list(scales.shape)} must be int8 [L, N, K] and float32 [L, N, K / G], N and K multiples of "
            f"{PACKED_MULTIPLE}, G {INT8_GROUP}, a multiple of {2 * INT8_GROUP}, or K"
        )
    shape = (*values.shape[:-1], values.shape[-1] + SCALE_BYTES * count)
    return jax.ffi.ffi_call(PACK_INT8, jax.ShapeDtypeStruct(shape, jnp.int8))(values, scales)


def packable_int8(shape: Sequence[int], group: int) -> bool:
    """Whether `pack_int8` takes values of this shape with a scale for `group` elements of a channel.

    They are matrices of all layers, [L, N, K], with N and K multiples of 16 that a matrix of floats may have
    as well; `group` is a divisor of K: 32, a multiple of 64, or K itself.
    """
    k = shape[-1] if packable(shape, jnp.float32) else 0
    divides = k > 0 and group > 0 and k % group == 0
    return divides and (group in (INT8_GROUP, k) or group % (2 * INT8_GROUP) == 0)


def int8_rows(w: jax.Array, rows: jax.Array, k: int) -> jax.Array:
    """Float32 [..., K]: rows of one matrix, int8 [N, W] from `pack_int8`, with the numbers `rows` [...]."""
    return _rows(w, rows, k, k * SCALE_BYTES // (w.shape[1] - k), load().int8_side())


def _rows(w: jax.Array, rows: jax.Array, k: int, group: int, side: int) -> jax.Array:
    """Float32 rows of a packed matrix."""
    values, scales = _values_and_scales(w, rows, k, group, side)
    scaled = values.astype(jnp.float32) * jax.lax.bitcast_convert_type(scales, jnp.float32)[..., None]
    return scaled.reshape(*rows.shape, k)


def _values_and_scales(
    w: jax.Array, rows: jax.Array, k: int, group: int, side: int
) -> tuple[jax.Array, jax.Array]:
    """[..., K / G, G] and the words of [..., K / G] scales, of rows of a packed matrix [N, width].

    A channel has a float32 scale for `group` of its `k` elements, of which `side` lie side by side.
    """
    panel_rows, width = load().panel_rows(), w.shape[1]
    scale_size = 4 // w.dtype.itemsize
    panels, panel = w.reshape(-1, panel_rows * width), (rows // panel_rows)[..., None, None]
    channel = (rows % panel_rows)[..., None, None]
    starts = jnp.arange(k // group)[:, None] * (panel_rows * (scale_size + group))  # [K / G, 1]
    scales = panels[panel, starts + channel * scale_size + jnp.arange(scale_size)]
    i = jnp.arange(group)
    at = panel_rows * scale_size + i // side * (side * panel_rows) + side * channel + i % side
    return panels[panel, starts + at], scales


def gate(x: jax.Array, activation: str) -> jax.Array:
    """f(x[..., :I]) * x[..., I:] of `x` [..., 2 I], computed in float32; the result has x's dtype.

    f is "silu" or "gelu_tanh". Raises ValueError for another or an odd width.
    """
    load()
    if activation not in ACTIVATIONS or x.shape[-1] % 2 or x.dtype not in DTYPES:
        raise ValueError(
            f"gate: activation {activation!r} must be one of {', '.join(ACTIVATIONS)}, x {x.dtype}"
            f"{list(x.shape)} bfloat16 or float32 of even width"
        )
    rows = x.reshape(-1, x.shape[-1])
    out = jax.ShapeDtypeStruct((rows.shape[0], rows.shape[1] // 2), x.dtype)
    y = jax.ffi.ffi_call(GATE, out)(rows, activation=np.int32(ACTIVATIONS.index(activation)))
    return y.reshape(*x.shape[:-1], -1)


def write_rows(
    pool: jax.Array,  # [L, slots, K, D]
    layer: jax.Array,  # [] int32
    new: jax.Array,  # [M, K, D], the pool's dtype; or floats into an int8 pool of D + 4 (ops/paging.py)
    indices: jax.Array,  # [M] int32; those outside of the layer are left out
) -> jax.Array:
    """`pool` with `new` at `indices` of a layer, in place where the pool is not needed any more.

    XLA's scatter on CPU takes 4 us a row. Raises ValueError for shapes that don't fit.
    """
    load()
    quantises = pool.dtype == jnp.int8 and new.dtype in DTYPES
    size = _head_size(new.shape[-1], pool.dtype) if quantises else new.shape[-1]
    if (
        (pool.ndim, new.ndim) != (4, 3)
        or (*new.shape[:2], size) != (*indices.shape, *pool.shape[2:])
        or not (quantises or new.dtype == pool.dtype)
    ):
        raise ValueError(
            f"write_rows: pool {pool.dtype}{list(pool.shape)}, new {new.dtype}{list(new.shape)} and indices "
            f"{list(indices.shape)} must be [L, slots, K, D], [M, K, D] of the same dtype, and [M]; or a "
            "pool of int8 [L, slots, K, D + 4] and new of bfloat16 or float32"
        )
    call = jax.ffi.ffi_call(
        WRITE_ROWS, jax.ShapeDtypeStruct(pool.shape, pool.dtype), input_output_aliases={0: 0}
    )
    return call(pool, layer.astype(jnp.int32), new, indices.astype(jnp.int32))


def zeros(shape: Sequence[int], dtype: DTypeLike) -> jax.Array:
    """jnp.zeros in pages of 2 MiB, where Linux has them: for arrays read all over, as a KV pool is."""
    load()
    return jax.ffi.ffi_call(ZEROS, jax.ShapeDtypeStruct(tuple(shape), dtype))()


def _head_size(head_dim: int, dtype: DTypeLike) -> int:
    """Elements of a head in a pool."""
    return head_dim + SCALE_BYTES * (jnp.dtype(dtype) == jnp.int8)


def _check_packable(name: str, w: jax.Array) -> None:
    if not packable(w.shape, w.dtype):
        raise ValueError(
            f"{name}: w is {w.dtype}{list(w.shape)}, must be bfloat16 or float32 [L, N, K] with N and K "
            f"multiples of {PACKED_MULTIPLE}"
        )


def _linear(
    target: str, x: jax.Array, w: jax.Array, layer: jax.Array | None, out_dtype: DTypeLike | None
) -> jax.Array:
    load()
    out = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    fixed = target == LINEAR_PACKED and w.dtype in (jnp.int16, jnp.int8)
    for name, dtype in (("x", x.dtype), ("w", jnp.bfloat16 if fixed else w.dtype), ("out_dtype", out)):
        if dtype not in DTYPES:
            raise ValueError(f"linear: {name} is {dtype}, must be bfloat16 or float32")
    k = _packed_k(x, w) if fixed else w.shape[-1]
    if w.ndim != (2 if layer is None else 3) or x.ndim < 1 or x.shape[-1] != k:
        raise ValueError(
            f"linear: x {x.shape} and w {w.shape} must be [..., K] and [N, K], or [L, N, K] with a layer"
        )
    rows, columns = x.reshape(-1, x.shape[-1]), w.shape[-2]
    w, layer = _stacked(w, layer)
    y = jax.ffi.ffi_call(target, jax.ShapeDtypeStruct((rows.shape[0], columns), out))(rows, w, layer)
    return y.reshape(*x.shape[:-1], columns)


def _packed_k(x: jax.Array, w: jax.Array) -> int | None:
    """The K of packed weights with scales. That of int8 ones follows from x: many may have their width."""
    k, width = x.shape[-1] if x.ndim else 0, w.shape[-1]
    if w.dtype == jnp.int16:
        return width - SCALE_WORDS
    scales = (width - k) // SCALE_BYTES
    fits = scales > 0 and k % scales == 0 and packable_int8((*w.shape[:-1], k), k // scales)
    return k if fits and width == k + scales * SCALE_BYTES else None


def _stacked(w: jax.Array, layer: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """`w` with a leading axis of layers, and which of them is meant."""
    return (w[None], jnp.int32(0)) if layer is None else (w, layer.astype(jnp.int32))


def paged_attention(
    q: jax.Array,  # [B, Q, N, D] this step's queries, right-padded to Q
    k_pages: jax.Array,  # [pages * page_size, K, D], or [L, pages * page_size, K, D]; of int8 D + 4
    v_pages: jax.Array,  # the same
    page_table: jax.Array,  # [B, P] int32; entries past the context are ignored
    context_lens: jax.Array,  # [B] int32, tokens in cache, this step's included
    query_lens: jax.Array,  # [B] int32, 0 marks an empty row
    layer: jax.Array | None = None,  # [] int32, which of the L
    *,
    page_size: int,
    scale: float,
    window: int | jax.Array | None = None,  # an array: [] int32
    soft_cap: float | None = None,
    sinks: jax.Array | np.ndarray | None = None,  # [N] float32
) -> jax.Array:  # [B, Q, N, D], q's dtype
    """Causal attention over a paged cache; scores, softmax and sums are float32.

    Query i of a row sits at position p = context_len - query_len + i and sees the keys up to p, with
    `window` only those after p - window. `soft_cap` c replaces a score s by c tanh(s / c). Queries past
    query_len return 0. Each of `sinks` is one more score of its head, whose value is 0; neither `scale` nor
    `soft_cap` is applied to it. Pages of int8 have a float32 behind a head's values (ops/paging.py).
    Cost follows the live context. A row's bits depend on its own keys and queries
    alone: not on the other rows, nor on the chunk it is computed in. What lies in unused slots is not read.
    Source: Kwon et al. 2023, arXiv:2309.06180, section 4.1; Dao et al. 2022, arXiv:2205.14135.
    Raises ValueError for shapes or dtypes that don't fit, NativeUnavailable without the kernels.
    """
    load()
    pool_shape = k_pages.shape if layer is None else k_pages.shape[1:]
    fits = q.ndim == 4 and len(pool_shape) == 3 and k_pages.shape == v_pages.shape
    if not fits or pool_shape[2] != _head_size(q.shape[3], k_pages.dtype):
        raise ValueError(
            f"paged_attention: q {q.shape}, k_pages {k_pages.shape} and v_pages {v_pages.shape} "
            "must be [B, Q, N, D] and twice [slots, K, D], or [L, slots, K, D] with a layer; D + 4 of int8"
        )
    batch, _, heads, head_dim = q.shape
    slots, kv_heads, _ = pool_shape
    if heads % kv_heads or head_dim % 16:
        raise ValueError(
            f"paged_attention: {heads} heads of {head_dim} over {kv_heads} kv heads; the heads must be a "
            "multiple of the kv heads, the head size of 16"
        )
    takes_pages = k_pages.dtype == v_pages.dtype and k_pages.dtype in (*DTYPES, jnp.int8)
    if q.dtype not in DTYPES or not takes_pages:
        raise ValueError(
            f"paged_attention: dtypes {q.dtype}, {k_pages.dtype}, {v_pages.dtype} must be bfloat16 or "
            "float32, or of the last two int8, and these equal"
        )
    if sinks is not None and sinks.shape != (heads,):
        raise ValueError(f"paged_attention: sinks {sinks.shape} must be [{heads}], one for each head")
    if page_size < 1 or slots < page_size or slots % page_size:
        raise ValueError(f"paged_attention: {slots} slots are not a whole number of pages of {page_size}")
    if (isinstance(window, int) and window < 1) or (soft_cap is not None and soft_cap <= 0):
        raise ValueError(f"paged_attention: window {window} and soft_cap {soft_cap} must be positive or None")
    if page_table.ndim != 2 or {page_table.shape[0], *context_lens.shape, *query_lens.shape} != {batch}:
        raise ValueError(
            f"paged_attention: page_table {page_table.shape}, context_lens {context_lens.shape} and "
            f"query_lens {query_lens.shape} must be [{batch}, P], [{batch}] and [{batch}]"
        )
    (k_pages, index), (v_pages, _) = _stacked(k_pages, layer), _stacked(v_pages, layer)
    return jax.ffi.ffi_call(PAGED_ATTENTION, jax.ShapeDtypeStruct(q.shape, q.dtype))(
        q,
        k_pages,
        v_pages,
        page_table.astype(jnp.int32),
        context_lens.astype(jnp.int32),
        query_lens.astype(jnp.int32),
        index,
        jnp.asarray(0 if window is None else window, jnp.int32),
        jnp.zeros(0, jnp.float32) if sinks is None else jnp.asarray(sinks, jnp.float32),
        page_size=np.int64(page_size),
        scale=np.float32(scale),
        soft_cap=np.float32(soft_cap or 0.0),
    )
