"""Tensors of a GGUF model, of one file or several, dequantised by the `gguf` package."""

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
from jaxserve.weights.gguf_parts import Piece, read_parts, stored_tensors
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
    """A TensorSource over one GGUF file, or over all parts of a split one, of which `path` may be any.

    Opening reads the headers; raises WeightsError. `metadata` holds plain Python values; long arrays (a
    vocabulary) are decoded when they are asked for.
    """

    format: Literal["gguf", "safetensors"] = "gguf"

    def __init__(self, path: str | Path):
        self.path = Path(path)
        parts = read_parts(self.path)
        self.metadata: Mapping[str, Any] = parts[0][1].metadata
        self._stored = stored_tensors(parts)
        self.tensors: Mapping[str, TensorInfo] = {name: one.info for name, one in self._stored.items()}
        self._files = [ByteFile(part) for part, _ in parts]

    def read(self, name: str) -> np.ndarray:
        """The whole tensor: bfloat16 and float16 as they are, everything else as float32."""
        info = self.tensors[name]
        if not info.shape:
            return self._read_flat(name, 0, 1).reshape(())
        return self.read_rows(name, 0, info.shape[0])

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) along axis 0. A 1-D tensor's rows are its elements."""
        shape = self.tensors[name].shape
        row = prod(shape[1:])
        return self._read_flat(name, start * row, stop * row).reshape(stop - start, *shape[1:])

    def close(self) -> None:
        for file in self._files:
            file.close()

    def _read_flat(self, name: str, start: int, stop: int) -> np.ndarray:
        """Elements [start, stop) of a tensor."""
        read, first = [], 0  # `first`: the element that a piece begins with
        for piece in self._stored[name].pieces:
            size = prod(piece.entry.info.shape)
            if first < stop and start < first + size:
                read.append(self._read_piece(piece, max(start - first, 0), min(stop - first, size)))
            first += size
        return read[0] if len(read) == 1 else np.concatenate(read)

    def _read_piece(self, piece: Piece, start: int, stop: int) -> np.ndarray:
        """Elements [start, stop); quantised blocks that are cut by either end are dequantised whole."""
        entry, file = piece.entry, self._files[piece.file]
        qtype = entry.qtype
        block, block_bytes = GGML_QUANT_SIZES[qtype]
        if (dtype := PLAIN.get(qtype)) is not None:
            raw = file.read(entry.offset + start * block_bytes, (stop - start) * block_bytes)
            return raw.view(dtype)
        first, last = start // block, -(-stop // block)
        out = np.empty((last - first) * block, np.float32)
        for at in range(first, last, BLOCK_ELEMENTS // block):
            end = min(at + BLOCK_ELEMENTS // block, last)
            raw = file.read(entry.offset + at * block_bytes, (end - at) * block_bytes)
            out[(at - first) * block : (end - first) * block] = self._dequantise(entry.info.name, qtype, raw)
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
