"""The forms in which Hugging Face checkpoints keep quantised matrices, and their values, row by row.

A matrix is [out, in] here, whichever way round a file has it. Integers are packed low bits first, but AWQ's.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from jaxserve.errors import WeightsError
from jaxserve.weights.safetensors import SafetensorsSource

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of each nibble of a word, from the lowest
GPTQ_BITS = (2, 4, 8)
PACKED_BITS = (4, 8)


class Form(Protocol):
    """One quantised tensor of a source."""

    names: tuple[str, ...]  # the tensors it is made of
    shape: tuple[int, ...]  # dequantised
    dtype: str  # as the file names it

    def rows(self, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) along axis 0, float32."""
        ...


class Mxfp4:
    """Experts in blocks of 32 e2m1 values, two a byte, and a power of two for each: [E, out, in].

    Given as [E, in, out], as the same experts are where they aren't quantised. Sources: OCP Microscaling
    Formats Specification v1.0, section 5.3; transformers' integrations/mxfp4.py.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]

    def __init__(self, source: SafetensorsSource, stem: str):
        self.names = stem + "_blocks", stem + "_scales"
        self._source = source
        E, rows, groups, _ = _shape_of(source, self.names[0], 4)
        _expect(source, self.names[0], [(E, rows, groups, 16)])
        _expect(source, self.names[1], [(E, rows, groups)])
        self.shape, self.dtype = (E, 32 * groups, rows), "MXFP4"

    def rows(self, start: int, stop: int) -> np.ndarray:
        blocks, scales = (self._source.read_stored(name, start, stop) for name in self.names)
        values = np.stack([E2M1[blocks & 15], E2M1[blocks >> 4]], axis=-1).reshape(*scales.shape, 32)
        values = np.ldexp(values, scales.astype(np.int32)[..., None] - 127)
        return values.reshape(*scales.shape[:2], -1).swapaxes(1, 2)


class Scaled:
    """One byte a value; (w - zero) * scale, with one of these for all, or a row, or a group of a row."""

    def __init__(self, source: SafetensorsSource, name: str, scale: str, zero: str | None = None):
        self._zero = zero if zero in source.tensors else None
        self.names = (name, scale) + ((self._zero,) if self._zero else ())
        self._source, self._scale = source, scale
        self.shape, self.dtype = _shape_of(source, name, 2), source.tensors[name].dtype
        rows, columns = self.shape
        found = source.tensors[scale].shape
        groups = found[1] if len(found) == 2 and found[1] and columns % found[1] == 0 else 1
        _expect(source, scale, [(), (1,), (1, 1), (rows,), (rows, 1), (rows, groups)])
        if self._zero is not None:
            _expect(source, self._zero, [found])

    def rows(self, start: int, stop: int) -> np.ndarray:
        values = self._source.read_stored(self.names[0], start, stop).astype(np.float32)
        if self._zero is not None:
            values -= self._by_value(self._zero, start, stop)
        values *= self._by_value(self._scale, start, stop)
        return values

    def _by_value(self, name: str, start: int, stop: int) -> np.ndarray:
        """A scale or zero for each of the values, or what broadcasts to that."""
        shape = self._source.tensors[name].shape
        if not shape or shape[0] != self.shape[0] or self.shape[0] == 1:
            return self._source.read_stored(name).astype(np.float32).reshape(1, -1)[:, :1]
        found = self._source.read_stored(name, start, stop).astype(np.float32).reshape(stop - start, -1)
        return np.repeat(found, self.shape[1] // found.shape[1], axis=1) if found.shape[1] > 1 else found


class Blocks:
    """One byte a value and a scale for each block of so many rows and columns."""

    names: tuple[str, ...]

    def __init__(self, source: SafetensorsSource, name: str, scale: str, block: tuple[int, int]):
        self.names, self._source, self._block = (name, scale), source, block
        self.shape, self.dtype = _shape_of(source, name, 2), source.tensors[name].dtype
        _expect(source, scale, [tuple(-(-size // b) for size, b in zip(self.shape, block))])

    def rows(self, start: int, stop: int) -> np.ndarray:
        height, width = self._block
        values = self._source.read_stored(self.names[0], start, stop).astype(np.float32)
        first = start // height
        scales = self._source.read_stored(self.names[1], first, -(-stop // height)).astype(np.float32)
        by_row = scales[np.arange(start, stop) // height - first]
        values *= np.repeat(by_row, width, axis=1)[:, : self.shape[1]]
        return values


class PackedRows:
    """compressed-tensors' packed integers, offset by half of their range; a scale for each group of a row."""

    def __init__(self, source: SafetensorsSource, stem: str, bits: int):
        self._source, self._bits = source, bits
        packed, scale, shape = (stem + end for end in (".weight_packed", ".weight_scale", ".weight_shape"))
        self._zero, self._g_idx = (
            name if (name := stem + end) in source.tensors else None
            for end in (".weight_zero_point", ".weight_g_idx")
        )
        self.names = (packed, scale, shape, *(n for n in (self._zero, self._g_idx) if n is not None))
        _expect(source, shape, [(2,)])
        rows, columns = self.shape = tuple(int(n) for n in source.read_stored(shape))
        self.dtype = f"I{bits}"
        each = 32 // bits
        _expect(source, packed, [(rows, -(-columns // each))])
        found = _shape_of(source, scale, 2)
        groups = found[1] if self._g_idx or (found[1] and columns % found[1] == 0) else 1
        _expect(source, scale, [(rows, groups)])
        if self._zero is not None:
            _expect(source, self._zero, [(-(-rows // each), groups)])
        if self._g_idx is not None:
            _expect(source, self._g_idx, [(columns,)])

    def rows(self, start: int, stop: int) -> np.ndarray:
        columns = self.shape[1]
        words = self._source.read_stored(self.names[0], start, stop)
        values = unpack(words, self._bits, 1)[:, :columns].astype(np.float32) - 2 ** (self._bits - 1)
        scales = self._source.read_stored(self.names[1], start, stop).astype(np.float32)
        group = np.arange(columns) // -(-columns // scales.shape[1])
        if self._g_idx is not None and (given := self._source.read_stored(self._g_idx)).min() >= 0:
            group = given
        if self._zero is not None:
            zeros = unpack(self._source.read_stored(self._zero), self._bits, 0)[start:stop]
            values -= (zeros.astype(np.float32) - 2 ** (self._bits - 1))[:, group]
        values *= scales[:, group]
        return values


class _Transposed:
    """A matrix kept as [in, out]. From its first row to its last the packed form stays in memory."""

    def __init__(self, source: SafetensorsSource, names: tuple[str, ...]):
        self.names, self._source = names, source
        self._kept: tuple[np.ndarray, ...] | None = None
        self.shape: tuple[int, ...] = ()

    def _stored(self, stop: int) -> tuple[np.ndarray, ...]:
        stored = self._kept or tuple(self._source.read_stored(name) for name in self.names)
        self._kept = None if stop == self.shape[0] else stored
        return stored


class Awq(_Transposed):
    """AWQ's 4 bits, packed along the outputs; (w - zero) * scale by groups of inputs.

    Source: AutoAWQ, WQLinear_GEMM.
    """

    dtype = "AWQ"

    def __init__(self, source: SafetensorsSource, stem: str):
        super().__init__(source, tuple(f"{stem}.{end}" for end in ("qweight", "qzeros", "scales")))
        columns, words = _shape_of(source, self.names[0], 2)
        self.shape = 8 * words, columns
        groups = _groups(source, self.names[2], columns)
        _expect(source, self.names[1], [(groups, words)])
        _expect(source, self.names[2], [(groups, 8 * words)])

    def rows(self, start: int, stop: int) -> np.ndarray:
        qweight, qzeros, scales = self._stored(stop)
        cut = slice(start // 8, -(-stop // 8))
        order = np.argsort(AWQ_ORDER)

        def unpacked(words: np.ndarray) -> np.ndarray:
            values = unpack(words[:, cut], 4, 1).reshape(len(words), -1, 8)[..., order]
            return values.reshape(len(words), -1)[:, start - 8 * cut.start : stop - 8 * cut.start]

        group = np.arange(self.shape[1]) // (self.shape[1] // len(scales))
        values = unpacked(qweight).astype(np.float32) - unpacked(qzeros).astype(np.float32)[group]
        return (values * scales[:, start:stop].astype(np.float32)[group]).T


class Gptq(_Transposed):
    """GPTQ's integers, packed along the inputs; (w - zero) * scale, the group of each input in a table.

    `zero_offset` is 1 where a file holds zeros less 1. Source: AutoGPTQ's and GPTQModel's torch layers.
    """

    dtype = "GPTQ"

    def __init__(self, source: SafetensorsSource, stem: str, bits: int, group_size: int, zero_offset: int):
        ends = ["qweight", "qzeros", "scales"] + ["g_idx"] * (f"{stem}.g_idx" in source.tensors)
        super().__init__(source, tuple(f"{stem}.{end}" for end in ends))
        self._bits, self._zero_offset = bits, zero_offset
        each = 32 // bits
        words, rows = _shape_of(source, self.names[0], 2)
        self.shape = rows, each * words
        self._group_size = group_size if group_size > 0 else self.shape[1]
        groups = -(-self.shape[1] // self._group_size)
        _expect(source, self.names[1], [(groups, -(-rows // each))])
        _expect(source, self.names[2], [(groups, rows)])
        if len(self.names) == 4:
            _expect(source, self.names[3], [(self.shape[1],)])

    def rows(self, start: int, stop: int) -> np.ndarray:
        qweight, qzeros, scales, *g_idx = self._stored(stop)
        group = g_idx[0] if g_idx else np.arange(self.shape[1]) // self._group_size
        each = 32 // self._bits
        cut = slice(start // each, -(-stop // each))
        zeros = unpack(qzeros[:, cut], self._bits, 1)[:, start - each * cut.start : stop - each * cut.start]
        zeros = zeros.astype(np.float32) + self._zero_offset
        values = unpack(qweight[:, start:stop], self._bits, 0).astype(np.float32) - zeros[group]
        return (values * scales[:, start:stop].astype(np.float32)[group]).T


def unpack(words: np.ndarray, bits: int, axis: int) -> np.ndarray:
    """The unsigned integers of `bits` in 32-bit `words` [M, N], side by side along `axis`, lowest first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    values = (words.view(np.uint32)[..., None] >> shifts) & np.uint32(2**bits - 1)  # [M, N, each]
    rows, columns = words.shape
    if axis == 0:
        return values.swapaxes(1, 2).reshape(-1, columns)
    return values.reshape(rows, -1)


def _groups(source: SafetensorsSource, scales: str, columns: int) -> int:
    groups = _shape_of(source, scales, 2)[0]
    if groups < 1 or columns % groups:
        raise WeightsError(f"{source.path}: tensor {scales!r} has {groups} groups for {columns} inputs")
    return groups


def _shape_of(source: SafetensorsSource, name: str, rank: int) -> tuple[int, ...]:
    if name not in source.tensors:
        raise WeightsError(f"{source.path}: tensor {name!r} is missing, a part of a quantised one")
    if len(shape := source.tensors[name].shape) != rank:
        raise WeightsError(f"{source.path}: tensor {name!r}: {rank} axes are expected, found {list(shape)}")
    return shape


def _expect(source: SafetensorsSource, name: str, shapes: list[tuple[int, ...]]) -> None:
    if name not in source.tensors:
        raise WeightsError(f"{source.path}: tensor {name!r} is missing, a part of a quantised one")
    if (found := source.tensors[name].shape) not in shapes:
        wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes))
        raise WeightsError(f"{source.path}: tensor {name!r}: expected {wanted}, found {list(found)}")
