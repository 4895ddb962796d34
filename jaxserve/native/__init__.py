"""C++ kernels for the CPU backend, called through XLA's FFI: dense layers and paged attention.

They are optional. `available()` says whether they can be used here and, if not, why; nothing else of this
package may be called before it returned True. See `library` for what is loaded and when.
"""

from __future__ import annotations

import functools

import jax

from jaxserve.native.library import NativeUnavailable, load
from jaxserve.native.ops import (
    ACTIVATIONS,
    gate,
    int8_rows,
    linear,
    linear_int8,
    linear_packed,
    pack,
    pack_int8,
    packable,
    packable_int8,
    packed_rows,
    paged_attention,
    write_rows,
    zeros,
)
from jaxserve.native.selftest import WrongKernel, self_test

__all__ = [
    "ACTIVATIONS", "NativeUnavailable", "WrongKernel", "available", "gate", "int8_rows", "linear",
    "linear_int8", "linear_packed", "pack", "pack_int8", "packable", "packable_int8", "packed_rows",
    "paged_attention", "self_test", "write_rows", "zeros",
]  # fmt: skip


@functools.cache
def available() -> tuple[bool, str]:
    """Whether the kernels can be used, and why not (or, if so, which instruction set they use).

    The first call initialises JAX's CPU backend, loads and registers the library and runs `self_test`
    (a fraction of a second); call it at start-up, outside of any traced function. Kernels that fail it give
    way to those for the next instruction set that this CPU has.
    """
    try:
        library = load()
    except NativeUnavailable as error:
        return False, str(error)
    refused: list[str] = []
    for isa in library.isas():
        library.use_isa(isa)
        try:
            self_test()
        except (WrongKernel, jax.errors.JaxRuntimeError) as error:  # the latter: an old build
            refused.append(f"those for {isa} are refused: {error}")
            continue
        return True, "; ".join([f"C++ kernels for {isa}", *refused])
    return False, "; ".join(refused)
