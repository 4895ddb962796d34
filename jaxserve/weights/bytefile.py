"""A file read by offset into fresh memory."""

from __future__ import annotations

import os
import weakref
from pathlib import Path

import numpy as np

from jaxserve.errors import WeightsError


class ByteFile:
    """An open file of a known size.

    Tensors are copied out with `preadv` rather than viewed through a mapping: pages of a mapping count
    towards this process's memory for as long as it stands, and a mapped file that somebody shortens
    kills the process (SIGBUS) where a short read is an error.
    """

    def __init__(self, path: Path):
        self.path = path
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise WeightsError(f"{path}: can't be opened: {error.strerror}") from error
        self._close = weakref.finalize(self, os.close, self._fd)
        self.size = os.fstat(self._fd).st_size

    def read(self, offset: int, nbytes: int) -> np.ndarray:
        """`nbytes` bytes from `offset` on, as uint8. Raises WeightsError when the file ends before."""
        if not self._close.alive:
            raise WeightsError(f"{self.path}: the file has been closed")
        if offset + nbytes > self.size:
            raise WeightsError(
                f"{self.path}: truncated: bytes {offset} to {offset + nbytes} are needed, "
                f"the file has {self.size}"
            )
        out = np.empty(nbytes, np.uint8)
        view = memoryview(out)
        done = 0
        while done < nbytes:
            try:
                count = os.preadv(self._fd, [view[done:]], offset + done)
            except OSError as error:
                where = f"reading at byte {offset + done}"
                raise WeightsError(f"{self.path}: {where}: {error.strerror}") from error
            if count == 0:
                raise WeightsError(f"{self.path}: truncated while it was being read, at byte {offset + done}")
            done += count
        return out

    def close(self) -> None:
        """Idempotent; also happens when the object is dropped."""
        self._close()
