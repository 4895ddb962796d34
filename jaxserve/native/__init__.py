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
    (a fraction of a second); call it at start-up, outside of any traced function.
    """
    try:
        library = load()
        self_test()
    except (NativeUnavailable, WrongKernel, jax.errors.JaxRuntimeError) as error:  # the last: an old build
        return False, str(error)
    return True, f"C++ kernels for {library.isa()}"
