"""Finds, checks, loads and registers the compiled kernels.

The order matters: the CPU backend is initialised first, because a target that is registered earlier breaks
it; and the library's FFI version is compared before registration, because an older jaxlib refuses a library
that was built against newer headers.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
from pathlib import Path

import jax
from jax import ffi

PATH = Path(__file__).parent / "_kernels.so"
GATE = "jaxserve_gate"
LINEAR = "jaxserve_linear"
LINEAR_PACKED = "jaxserve_linear_packed"
PACK = "jaxserve_pack"
PACK_INT8 = "jaxserve_pack_int8"
PAGED_ATTENTION = "jaxserve_paged_attention"
WRITE_ROWS = "jaxserve_write_rows"
ZEROS = "jaxserve_zeros"


class NativeUnavailable(RuntimeError):
    """The C++ kernels can't be used here. The text says why and what would change that."""


class Library:
    """The loaded kernels. One per process, from `load`."""

    def __init__(self, dll: ctypes.CDLL):
        self._dll = dll
        dll.jaxserve_isa.restype = ctypes.c_char_p
        dll.jaxserve_isa_that_runs.restype = ctypes.c_char_p
        dll.jaxserve_use_isa.argtypes = [ctypes.c_char_p]

    def isa(self) -> str:
        """The instruction set of the kernels in use: the best one that this CPU has, or "portable"."""
        return self._dll.jaxserve_isa().decode()

    def isas(self) -> list[str]:
        """The instruction sets with kernels that this CPU runs, fastest first."""
        names = map(self._dll.jaxserve_isa_that_runs, itertools.count())
        return [name.decode() for name in itertools.takewhile(bool, names)]

    def panel_rows(self) -> int:
        """Channels that lie together in packed weights, with the kernels in use."""
        return self._dll.jaxserve_panel_rows()

    def int8_side(self) -> int:
        """Elements of a channel that lie side by side in packed int8 weights, with the kernels in use."""
        return self._dll.jaxserve_int8_side()

    def keeps_bfloat16(self) -> bool:
        """Whether packed bfloat16 weights stay such: elsewhere they are whole numbers with a scale."""
        return bool(self._dll.jaxserve_keeps_bf16())

    def use_isa(self, name: str) -> None:
        """Switches the whole process to the kernels for another instruction set, to compare them.

        Weights packed before can't be used any more: each instruction set has an order of its own.
        """
        if not self._dll.jaxserve_use_isa(name.encode()):
            raise NativeUnavailable(f"this CPU or build has no kernels for {name!r}")


@functools.cache
def load() -> Library:
    """Loads and registers the kernels, once. Raises NativeUnavailable with the reason."""
    if not PATH.exists():
        raise NativeUnavailable(
            f"{PATH.name} is not there: it is built when jaxserve is installed, if a C++17 compiler is there"
        )
    try:
        dll = ctypes.CDLL(str(PATH))
        built = dll.jaxserve_ffi_major(), dll.jaxserve_ffi_minor()
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"{PATH.name} can't be loaded: {error}") from error
    check_version(built, jaxlib_version())
    try:
        jax.local_devices(backend="cpu")
    except RuntimeError as error:
        raise NativeUnavailable(f"JAX has no CPU backend: {error}") from error
    for name in (GATE, LINEAR, LINEAR_PACKED, PACK, PACK_INT8, PAGED_ATTENTION, WRITE_ROWS, ZEROS):
        try:
            ffi.register_ffi_target(name, ffi.pycapsule(getattr(dll, name)), platform="cpu")
        except Exception as error:  # jaxlib's own error types differ between versions
            raise NativeUnavailable(f"jaxlib refuses {name} of {PATH.name}: {error}") from error
    return Library(dll)


def check_version(built: tuple[int, int], runs: tuple[int, int]) -> None:
    """Raises NativeUnavailable unless a library with FFI version `built` is accepted by version `runs`."""
    if built[0] != runs[0] or built[1] > runs[1]:
        raise NativeUnavailable(
            f"{PATH.name} was built for XLA FFI {built[0]}.{built[1]}, the installed jaxlib has "
            f"{runs[0]}.{runs[1]}: reinstall jaxserve to build it again"
        )


def jaxlib_version() -> tuple[int, int]:
    """(major, minor) of the FFI that the installed jaxlib implements, read from its own header."""
    header = Path(ffi.include_dir()) / "xla/ffi/api/c_api.h"
    try:
        text = header.read_text()
        major, minor = (
            int(re.search(rf"#define XLA_FFI_API_{part} (\d+)", text).group(1))  # type: ignore[union-attr]
            for part in ("MAJOR", "MINOR")
        )
    except (OSError, AttributeError) as error:
        raise NativeUnavailable(f"can't read jaxlib's FFI version from {header.name}: {error}") from error
    return major, minor
