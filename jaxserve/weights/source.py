"""Where tensors come from: one lazy, tensor-by-tensor interface over every file format."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What is known of a tensor without reading it. `shape` is row-major: a linear is [out, in]."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as the file names it: "F32", "BF16", "Q4_1"
    nbytes: int  # in the file


class TensorSource(Protocol):
    """An opened model. Opening reads headers only; `read` touches one tensor.

    `metadata` is the format's own description of the model: the dict of config.json for "safetensors",
    the GGUF key-value pairs (Python values) for "gguf".
    """

    path: Path
    format: Literal["gguf", "safetensors"]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]

    def read(self, name: str) -> np.ndarray:
        """The tensor, dequantised; float32, or the file's own bfloat16/float16 where it is unquantised."""
        ...

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        """Rows [start, stop) of `read(name)` along axis 0, in memory for those rows alone."""
        ...

    def close(self) -> None: ...
