"""The head of a GGUF file: key-value pairs and tensor directory.

The `gguf` package's own reader makes several NumPy objects for every element of every array, which takes
half a minute for a vocabulary of 262k tokens, and trusts every count in the file. This one walks the
bytes once, checks each count against what is left of the file, and decodes long arrays on first use.
Source: github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from jaxserve.errors import WeightsError
from jaxserve.weights.source import TensorInfo

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4  # GGML_MAX_DIMS
MAX_ARRAY_DEPTH = 4  # arrays of arrays; the format has no limit of its own
STRING, ARRAY = 8, 9
# Value type -> little-endian NumPy type.
SCALARS = {
    0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4",
    6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8",
}  # fmt: skip
_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """Where a tensor lies. `info.shape` is reversed from the file, which counts the fastest axis first."""

    info: TensorInfo
    qtype: GGMLQuantizationType
    offset: int  # from the start of the file


@dataclass(frozen=True, slots=True)
class Header:
    metadata: Mapping[str, Any]
    entries: dict[str, TensorEntry]


class LazyValues(Mapping[str, Any]):
    """Plain Python values; those given as functions are computed at their first use and kept."""

    def __init__(self, values: dict[str, Any]):
        self._values = values

    def __getitem__(self, key: str) -> Any:
        value = self._values[key]
        if callable(value):
            value = self._values[key] = value()
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values


def read_header(path: Path) -> Header:
    """Parse the head of the GGUF file at `path`.

    Raises WeightsError for what is no GGUF file, is cut off anywhere (tensor data included), names a
    key or a tensor twice, or has a value or tensor type that is not known.
    """
    try:
        with open(path, "rb") as file:
            # An empty file can't be mapped.
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if file.seek(0, 2) else b""
    except OSError as error:
        raise WeightsError(f"{path}: can't be opened: {error.strerror}") from error
    return _Parser(path, data).header()


class _Parser:
    def __init__(self, path: Path, data: mmap.mmap | bytes):
        self.path = path
        self.data = data
        self.size = len(data)
        self.at = 0

    def header(self) -> Header:
        if (magic := bytes(self.data[:4])) != MAGIC:
            raise WeightsError(f"{self.path}: no GGUF file: it begins with {magic!r}, not {MAGIC!r}")
        self.at = 4
        version = self.u32("the version")
        if version & 0xFFFF == 0:
            raise WeightsError(f"{self.path}: a big-endian GGUF file; only little-endian ones can be read")
        if version not in VERSIONS:
            raise WeightsError(f"{self.path}: GGUF version {version}; versions {VERSIONS} can be read")
        # Smallest encodings: a tensor is name length, dimension count, type and offset; a pair is key
        # length, type and one byte.
        num_tensors = self.count("the number of tensors", 24)
        num_pairs = self.count("the number of key-value pairs", 13)
        values: dict[str, Any] = {}
        for i in range(num_pairs):
            key = self.string(f"key {i} of {num_pairs}")
            if key in values:
                raise WeightsError(f"{self.path}: key {key!r} occurs twice")
            values[key] = self.value(self.u32(f"the type of {key}"), key)
        directory = [self.tensor(i, num_tensors) for i in range(num_tensors)]
        alignment = values.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise WeightsError(f"{self.path}: general.alignment is {alignment!r}, not a power of two")
        start = (self.at + alignment - 1) // alignment * alignment
        return Header(LazyValues(values), self.entries(directory, start))

    def entries(
        self, directory: list[tuple[TensorInfo, GGMLQuantizationType, int]], start: int
    ) -> dict[str, TensorEntry]:
        entries: dict[str, TensorEntry] = {}
        for info, qtype, relative in directory:
            if info.name in entries:
                raise WeightsError(f"{self.path}: tensor {info.name!r} occurs twice")
            end = start + relative + info.nbytes
            if end > self.size:
                raise WeightsError(
                    f"{self.path}: truncated: tensor {info.name!r} ends at byte {end}, "
                    f"the file has {self.size}"
                )
            entries[info.name] = TensorEntry(info, qtype, start + relative)
        return entries

    def tensor(self, index: int, of: int) -> tuple[TensorInfo, GGMLQuantizationType, int]:
        name = self.string(f"the name of tensor {index} of {of}")
        if (num_dims := self.u32(f"the dimensions of {name}")) > MAX_DIMS:
            raise WeightsError(
                f"{self.path}: tensor {name!r} has {num_dims} dimensions; at most {MAX_DIMS} are possible"
            )
        dims = [self.u64(f"the shape of {name}") for _ in range(num_dims)]
        number = self.u32(f"the type of {name}")
        offset = self.u64(f"the offset of {name}")
        try:
            qtype = GGMLQuantizationType(number)
        except ValueError:
            raise WeightsError(
                f"{self.path}: tensor {name!r} has the quantisation type {number}, "
                "which this version of the gguf package does not know"
            ) from None
        block, block_bytes = GGML_QUANT_SIZES[qtype]
        while len(dims) > 1 and dims[-1] == 1:  # to ggml, [n] and [n, 1] are one shape; files have either
            dims.pop()
        shape = tuple(reversed(dims))
        if 0 in shape or (shape and shape[-1] % block):
            raise WeightsError(
                f"{self.path}: tensor {name!r} has the shape {list(shape)}; rows of {qtype.name} "
                f"are a positive multiple of {block} long"
            )
        if not shape and block != 1:
            raise WeightsError(f"{self.path}: tensor {name!r} is a scalar, which can't be {qtype.name}")
        return TensorInfo(name, shape, qtype.name, prod(shape) // block * block_bytes), qtype, offset

    def value(self, kind: int, key: str, depth: int = 0) -> Any:
        """A value, or for a long array the function that decodes it; moves past it either way."""
        if (dtype := SCALARS.get(kind)) is not None:
            return np.frombuffer(self.take(np.dtype(dtype).itemsize, key), dtype)[0].item()
        if kind == STRING:
            return self.string(key)
        if kind != ARRAY:
            raise WeightsError(f"{self.path}: key {key!r} has the unknown value type {kind}")
        if depth == MAX_ARRAY_DEPTH:
            raise WeightsError(f"{self.path}: key {key!r} nests arrays deeper than {MAX_ARRAY_DEPTH}")
        item = self.u32(f"the item type of {key}")
        if (dtype := SCALARS.get(item)) is not None:
            length = self.count(f"the length of {key}", np.dtype(dtype).itemsize)
            raw = self.take(length * np.dtype(dtype).itemsize, key)
            decode: Callable[[], list[Any]] = lambda: np.frombuffer(raw, dtype).tolist()
        elif item == STRING:
            decode = self.strings(key)
        elif item == ARRAY:
            length = self.count(f"the length of {key}", 12)
            return [self.value(ARRAY, key, depth + 1) for _ in range(length)]
        else:
            raise WeightsError(f"{self.path}: key {key!r} has the unknown item type {item}")
        return decode if depth == 0 else decode()

    def strings(self, key: str) -> Callable[[], list[str]]:
        """Walk over an array of strings; returns what decodes it."""
        length = self.count(f"the length of {key}", 8)
        begin, at, unpack = self.at, self.at, _U64.unpack_from
        lengths = []
        try:
            for _ in range(length):
                (n,) = unpack(self.data, at)
                at += 8 + n
                lengths.append(n)
        except (struct.error, OverflowError):
            at = self.size + 1
        raw = self.take(at - begin, key)

        def decode() -> list[str]:
            out, offset = [], 0
            try:
                for n in lengths:
                    out.append(raw[offset + 8 : offset + 8 + n].decode())
                    offset += 8 + n
            except UnicodeDecodeError as error:
                raise WeightsError(f"{self.path}: item {len(out)} of {key} is not UTF-8: {error}") from None
            return out

        return decode

    def string(self, what: str) -> str:
        length = self.u64(what)
        try:
            return self.take(length, what).decode()
        except UnicodeDecodeError as error:
            raise WeightsError(f"{self.path}: {what} is not UTF-8: {error}") from None

    def count(self, what: str, min_bytes: int) -> int:
        """A number of things of at least `min_bytes` each, checked against what is left of the file."""
        count = self.u64(what)
        if count * min_bytes > (left := self.size - self.at):
            raise WeightsError(
                f"{self.path}: corrupt or truncated: {what} is {count}, "
                f"for which the {left} bytes that follow can't be enough"
            )
        return count

    def u32(self, what: str) -> int:
        return _U32.unpack(self.take(4, what))[0]

    def u64(self, what: str) -> int:
        return _U64.unpack(self.take(8, what))[0]

    def take(self, nbytes: int, what: str) -> bytes:
        if nbytes > self.size - self.at:
            raise WeightsError(f"{self.path}: truncated in its header, at {what} (byte {self.at})")
        self.at += nbytes
        return bytes(self.data[self.at - nbytes : self.at])
