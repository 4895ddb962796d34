"""Which implementation of attention and of dense layers a process uses. Chosen once, at start-up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from jaxserve.errors import ConfigError
from jaxserve.ops.attention.reference import paged_attention_xla
from jaxserve.ops.gate import gate_xla
from jaxserve.ops.linear import linear_xla
from jaxserve.ops.paging import write_kv
from jaxserve.ops.quant import Int8, Matrix, quantised_rows

CHOICES = ("auto", "native", "xla")
HEADS = ("embedding.weight", "lm_head.weight")  # matrices [V, H] that give logits, or may
NATIVE_HEAD_DIM = 16  # the native attention kernel takes heads of a multiple of so many values


def _as_it_is(name: str, weight: Matrix) -> Matrix:
    return weight


def _rows(weight: Matrix, numbers: jax.Array, width: int) -> jax.Array:
    return quantised_rows(weight, numbers) if isinstance(weight, Int8) else weight[numbers]


@dataclass(frozen=True, slots=True)
class Backend:
    """The operations that differ from device to device. `attention` and `linear` are traceable."""

    attention_name: str
    linear_name: str
    attention: Callable[..., jax.Array]  # paged_attention_xla's signature
    linear: Callable[..., jax.Array]  # linear_xla's signature
    # (parameter's name, weight) -> what `linear` reads in its place, perhaps of another shape and dtype;
    # an Int8 stays one
    prepare: Callable[[str, Matrix], Matrix] = _as_it_is
    gate: Callable[[jax.Array, str], jax.Array] = gate_xla
    write_kv: Callable[..., jax.Array] = write_kv  # ops/paging.py's signature
    zeros: Callable[[Sequence[int], DTypeLike], jax.Array] = jnp.zeros  # (shape, dtype), for the KV pool
    rows: Callable[[Matrix, jax.Array, int], jax.Array] = _rows  # (prepared [N, K], their numbers, K)
    kernels: str = "XLA's"  # which, for people: with the reason where they are not the C++ ones
    pool_lanes: int | None = None  # a token's row in the KV pool is padded to so many; None: no rows, [K, D]


XLA = Backend("xla", "xla", paged_attention_xla, linear_xla)
XLA_TPU = replace(XLA, pool_lanes=128)


def choose(
    attention: str = "auto",
    linear: str = "auto",
    *,
    head_dim: int = NATIVE_HEAD_DIM,
) -> Backend:
    """The backend for JAX's default device. "auto" takes native CPU kernels where they run, else XLA.

    `head_dim` is the model's: native attention doesn't take every size.

    Raises ConfigError when a named one can't run here; it never falls back in silence.
    """
    for flag, value in (("attention_backend", attention), ("linear_backend", linear)):
        if value not in CHOICES:
            raise ConfigError(f"{flag}: {value!r} is unknown; choose one of {', '.join(CHOICES)}")
    usable, reason = False, "the native kernels run on CPU only"
    if (attention, linear) == ("xla", "xla"):
        reason = "they were asked for"
    elif jax.default_backend() == "cpu":
        from jaxserve import native

        usable, reason = native.available()
    for flag, value in (("attention_backend", attention), ("linear_backend", linear)):
        if value == "native" and not usable:
            raise ConfigError(f"{flag}=native can't run here: {reason}; use auto or xla")
    takes_heads = head_dim % NATIVE_HEAD_DIM == 0
    if attention == "native" and not takes_heads:
        raise ConfigError(
            f"attention_backend=native can't run this model: its heads have {head_dim} values, the kernel "
            f"takes multiples of {NATIVE_HEAD_DIM}; use auto or xla"
        )
    if not usable:
        return replace(XLA_TPU if jax.default_backend() == "tpu" else XLA, kernels=f"XLA's: {reason}")
    from jaxserve import native

    native_attention, native_linear = attention != "xla" and takes_heads, linear != "xla"
    return Backend(
        "native" if native_attention else "xla",
        "native" if native_linear else "xla",
        _native_attention if native_attention else paged_attention_xla,
        _native_linear if native_linear else linear_xla,
        prepare=_pack if native_linear else _as_it_is,
        gate=_native_gate,
        write_kv=_native_write_kv,
        zeros=native.zeros,
        rows=_native_rows if native_linear else _rows,
        kernels=reason,
    )


def _pack(name: str, weight: Matrix) -> Matrix:
    """Weights of dense layers in the order of the native kernel, where it takes their shape.

    The output head too, and a tied embedding with it, in bfloat16 and int8: `_native_rows` finds its rows
    again.
    """
    from jaxserve import native

    if isinstance(weight, Int8):
        return _pack_int8(name, weight)
    if native.packable(weight.shape, weight.dtype):
        return native.pack(weight)
    if name in HEADS and weight.dtype == jnp.bfloat16 and native.packable((1, *weight.shape), weight.dtype):
        return native.pack(weight[None])[0]
    return weight


def _pack_int8(name: str, weight: Int8[jax.Array]) -> Int8[jax.Array]:
    from jaxserve import native

    values, scales = weight
    group, is_head = values.shape[-1] // scales.shape[-1], name in HEADS
    stacked = (1, *values.shape) if is_head else values.shape
    if not native.packable_int8(stacked, group):
        return weight
    packed = native.pack_int8(values.reshape(stacked), scales.reshape(*stacked[:-1], -1))
    return Int8(packed[0] if is_head else packed, jnp.zeros(0, jnp.float32))


def _native_linear(
    x: jax.Array, weight: Matrix, layer: jax.Array | None = None, *, out_dtype: DTypeLike | None = None
) -> jax.Array:
    from jaxserve import native

    if isinstance(weight, Int8):
        if not weight.is_packed:
            return linear_xla(x, weight, layer, out_dtype=out_dtype)
        packed = weight.values
        if layer is None:
            packed, layer = packed[None], jnp.int32(0)
        return native.linear_int8(x, packed, layer, out_dtype=out_dtype)
    if layer is None and weight.dtype == jnp.int16:
        return native.linear_packed(x, weight[None], jnp.int32(0), out_dtype=out_dtype)
    if layer is not None and (weight.dtype == jnp.int16 or native.packable(weight.shape, weight.dtype)):
        return native.linear_packed(x, weight, layer, out_dtype=out_dtype)
    return native.linear(x, weight, layer, out_dtype=out_dtype)


def _native_rows(weight: Matrix, numbers: jax.Array, width: int) -> jax.Array:
    from jaxserve import native

    if isinstance(weight, Int8):
        if weight.is_packed:
            return native.int8_rows(weight.values, numbers, width)
    elif weight.dtype == jnp.int16:
        return native.packed_rows(weight, numbers)
    return _rows(weight, numbers, width)


def _native_gate(x: jax.Array, activation: str) -> jax.Array:
    from jaxserve import native

    return native.gate(x, activation) if activation in native.ACTIVATIONS else gate_xla(x, activation)


def _native_write_kv(pool: jax.Array, layer: jax.Array, new: jax.Array, indices: jax.Array) -> jax.Array:
    from jaxserve import native

    flat = new.reshape(-1, *new.shape[2:])
    if pool.dtype != jnp.int8:
        flat = flat.astype(pool.dtype)
    return native.write_rows(pool, layer, flat, indices.reshape(-1))


def _native_attention(
    q: jax.Array,
    k_pool: jax.Array,
    v_pool: jax.Array,
    layer: jax.Array,
    window: jax.Array,
    page_table: jax.Array,
    context_lens: jax.Array,
    query_lens: jax.Array,
    *,
    page_size: int,
    scale: float,
    num_kv_heads: int | None = None,
    soft_cap: float | None = None,
    sinks: jax.Array | None = None,
) -> jax.Array:
    from jaxserve import native

    assert num_kv_heads in (None, k_pool.shape[2]), "the native kernels read pools of [K, D]"
    return native.paged_attention(
        q, k_pool, v_pool, page_table, context_lens, query_lens, layer,
        page_size=page_size, scale=scale, window=window, soft_cap=soft_cap, sinks=sinks,
    )  # fmt: skip
