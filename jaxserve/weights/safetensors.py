"""Tensors of a Hugging Face folder: config.json and safetensors, in one file or in shards."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open

from jaxserve.errors import WeightsError
from jaxserve.weights.bytefile import ByteFile
from jaxserve.weights.source import TensorInfo

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
DTYPES = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
QUANTISED = {  # weights are made of these, they are none
    "U8": np.dtype("u1"),
    "I8": np.dtype("i1"),
    "I32": np.dtype("<i4"),
    "I64": np.dtype("<i8"),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
}


class SafetensorsSource:
    """A TensorSource over a folder. Opening reads config.json and headers; raises WeightsError.

    Which shard holds a tensor is read from the shards themselves; the index must agree with them.
    """

    format: Literal["gguf", "safetensors"] = "safetensors"

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self.metadata: Mapping[str, Any] = read_json(self.path / "config.json")
        self._shards: dict[str, _Shard] = {}
        self._shard_of: dict[str, _Shard] = {}
        index = self._index()
        for filename in sorted(set(index.values())) if index is not None else [SINGLE]:
            shard = self._shards[filename] = _Shard(self.path / filename)
            for name in shard.tensors:
                if (other := self._shard_of.get(name)) is not None:
                    raise WeightsError(
                        f"{self.path}: tensor {name!r} is in two shards, "
                        f"{other.file.path.name} and {filename}"
                    )
                self._shard_of[name] = shard
        for name, filename in (index or {}).items():
            if name not in self._shards[filename].tensors:
                raise WeightsError(
                    f"{self.path}: {INDEX} says that tensor {name!r} is in {filename}, which lacks it"
                )
        self.tensors: Mapping[str, TensorInfo] = {
            name: shard.tensors[name][0] for name, shard in self._shard_of.items()
        }

    def read(self, name: str) -> np.ndarray:
        """The whole tensor, in the file's own type."""
        shape = self.tensors[name].shape
        return self._shard_of[name].read(name, 0, prod(shape)).reshape(shape)

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) along axis 0. A 1-D tensor's rows are its elements."""
        shape = self.tensors[name].shape
        row = prod(shape[1:])
        return self._shard_of[name].read(name, start * row, stop * row).reshape(stop - start, *shape[1:])

    def read_stored(self, name: str, start: int = 0, stop: int | None = None) -> np.ndarray:
        """`read`, or with `stop` `read_rows`, of a tensor that may be a part of a quantised one."""
        shape = self.tensors[name].shape
        if stop is not None:
            shape = stop - start, *shape[1:]
        first = start * prod(shape[1:])
        dtypes = DTYPES | QUANTISED
        return self._shard_of[name].read(name, first, first + prod(shape), dtypes).reshape(shape)

    def close(self) -> None:
        for shard in self._shards.values():
            shard.file.close()

    def _index(self) -> dict[str, str] | None:
        """Tensor name -> file name, or None for a folder with a single file."""
        if not (self.path / INDEX).exists():
            return None
        index = read_json(self.path / INDEX).get("weight_map")
        if not isinstance(index, dict) or not index:
            raise WeightsError(f"{self.path / INDEX}: 'weight_map' is missing or empty")
        for name, filename in index.items():
            # Plain names only: an index must not point out of its folder.
            if not isinstance(filename, str) or Path(filename).name != filename:
                raise WeightsError(f"{self.path / INDEX}: tensor {name!r}: {filename!r} is no file name")
        return index


class _Shard:
    """One safetensors file: tensors by name, with their place in the file."""

    def __init__(self, path: Path):
        self.file = ByteFile(path)
        try:
            # The format owner's own reader judges the header: sizes, gaps, overlaps, truncation.
            with safe_open(path, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise WeightsError(f"{path}: corrupt or truncated: {error}") from None
        length = int(self.file.read(0, 8).view("<u8")[0])
        try:
            header = json.loads(self.file.read(8, length).tobytes(), object_pairs_hook=_unique)
        except ValueError as error:
            raise WeightsError(f"{path}: corrupt header: {error}") from None
        self.tensors: dict[str, tuple[TensorInfo, int]] = {}
        for name, entry in header.items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                info = TensorInfo(name, tuple(entry["shape"]), entry["dtype"], end - begin)
                self.tensors[name] = info, 8 + length + begin

    def read(self, name: str, start: int, stop: int, dtypes: Mapping[str, np.dtype] = DTYPES) -> np.ndarray:
        """Elements [start, stop), flat."""
        info, offset = self.tensors[name]
        if (dtype := dtypes.get(info.dtype)) is None:
            raise WeightsError(
                f"{self.file.path}: tensor {name!r} is {info.dtype}; {', '.join(dtypes)} can be read"
            )
        raw = self.file.read(offset + start * dtype.itemsize, (stop - start) * dtype.itemsize)
        return raw.view(dtype)


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises WeightsError when it is missing, no JSON or no object."""
    try:
        data = json.loads(path.read_bytes(), object_pairs_hook=_unique)
    except OSError as error:
        raise WeightsError(f"{path}: can't be opened: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: no valid JSON: {error}") from None
    if not isinstance(data, dict):
        raise WeightsError(f"{path}: a JSON object is expected, found {type(data).__name__}")
    return data


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} occurs twice")
    return data
