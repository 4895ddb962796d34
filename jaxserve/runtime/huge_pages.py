"""Asks Linux to keep large arrays of the CPU backend in pages of 2 MiB.

A step reads all weights and the live KV once. In pages of 4 KiB each MiB of that costs 256 address
translations, which a virtual machine pays for twice.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Iterable

import jax

MADV_HUGEPAGE = 14
MADV_COLLAPSE = 25  # Linux 6.1 and newer: moves what is there already
HUGE_PAGE = 2 << 20

log = logging.getLogger(__name__)


def use_huge_pages(arrays: Iterable[jax.Array]) -> int:
    """How many bytes of `arrays` now lie in huge pages; 0 where the system has none.

    Only whole huge pages inside an array are moved; its contents and address stay.
    """
    if sys.platform != "linux" or jax.default_backend() != "cpu":
        return 0
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    moved = 0
    for array in arrays:
        address = jax.block_until_ready(array).unsafe_buffer_pointer()
        first = -(-address // HUGE_PAGE) * HUGE_PAGE
        size = (address + array.nbytes) // HUGE_PAGE * HUGE_PAGE - first
        if size <= 0:
            continue
        madvise(first, size, MADV_HUGEPAGE)
        if madvise(first, size, MADV_COLLAPSE) == 0:
            moved += size
        else:
            log.debug("no huge pages: errno %d", ctypes.get_errno())
    return moved
