"""Tensors of a GGUF file, dequantised by the `gguf` package."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from gguf import quants
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxserve.errors import WeightsError
from jaxserve.weights.bytefile import ByteFile
from jaxserve.weights.gguf_header import read_header
from jaxserve.weights.source import TensorInfo

# Unquantised types and what they are in the file.
PLAIN = {
    GGMLQuantizationType.F32: np.dtype("<f4"),
    GGMLQuantizationType.F16: np.dtype("<f2"),
    GGMLQuantizationType.BF16: np.dtype(ml_dtypes.bfloat16),
}
BLOCK_ELEMENTS = 1 << 20  # dequantised at a time
GROUP_ELEMENTS = 4096  # a "row" to the dequantiser, which does 16 at a time: 256 KiB, within L2


class GGUFSource:
    """A TensorSource over one GGUF file. Opening reads the header; raises WeightsError.

    `metadata` holds plain Python values; long arrays (a vocabulary) are decoded when they are asked for.
    """

    format: Literal["gguf", "safetensors"] = "gguf"

    def __init__(self, path: str | Path):
        self.path = Path(path)
        header = read_header(self.path)
        self.metadata: Mapping[str, Any] = header.metadata
        self.tensors: Mapping[str, TensorInfo] = {name: e.info for name, e in header.entries.items()}
        self._entries = header.entries
        self._file = ByteFile(self.path)

    def read(self, name: str) -> np.ndarray:
        """The whole tensor: bfloat16 and float16 as they are, everything else as float32."""
        info = self._entries[name].info
        if not info.shape:
            return self._read_flat(name, 0, 1).reshape(())
        return self.read_rows(name, 0, info.shape[0])

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) along axis 0. A 1-D tensor's rows are its elements."""
        shape = self._entries[name].info.shape
        row = prod(shape[1:])
        return self._read_flat(name, start * row, stop * row).reshape(stop - start, *shape[1:])

    def close(self) -> None:
        self._file.close()

    def _read_flat(self, name: str, start: int, stop: int) -> np.ndarray:
        """Elements [start, stop); quantised blocks that are cut by either end are dequantised whole."""
        entry = self._entries[name]
        qtype = entry.qtype
        block, block_bytes = GGML_QUANT_SIZES[qtype]
        if (dtype := PLAIN.get(qtype)) is not None:
            raw = self._file.read(entry.offset + start * block_bytes, (stop - start) * block_bytes)
            return raw.view(dtype)
        first, last = start // block, -(-stop // block)
        out = np.empty((last - first) * block, np.float32)
        for at in range(first, last, BLOCK_ELEMENTS // block):
            end = min(at + BLOCK_ELEMENTS // block, last)
            raw = self._file.read(entry.offset + at * block_bytes, (end - at) * block_bytes)
            out[(at - first) * block : (end - first) * block] = self._dequantise(name, qtype, raw)
        return out[start - first * block : stop - first * block]

    def _dequantise(self, name: str, qtype: GGMLQuantizationType, raw: np.ndarray) -> np.ndarray:
        block, block_bytes = GGML_QUANT_SIZES[qtype]
        # Blocks are independent, so they may be regrouped into rows of a size that the cache likes.
        blocks_per_row = max(1, GROUP_ELEMENTS // block)
        whole = raw.size // (blocks_per_row * block_bytes) * blocks_per_row * block_bytes
        rows = (raw[:whole].reshape(-1, blocks_per_row * block_bytes), raw[whole:].reshape(1, -1))
        try:
            # Corrupt scales overflow; a block of them is not this reader's to judge.
            with np.errstate(all="ignore"):
                parts = [quants.dequantize(part, qtype).ravel() for part in rows if part.size]
        except NotImplementedError:
            raise WeightsError(
                f"{self.path}: tensor {name!r} is {qtype.name}, which the gguf package can't dequantise"
            ) from None
        return np.concatenate(parts)
