"""jaxserve.json: what a converted folder holds, and whether its files are whole."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from jaxserve.errors import ConfigError, WeightsError
from jaxserve.models.config import ModelConfig
from jaxserve.weights.loader import held_arrays
from jaxserve.weights.safetensors import read_json

FORMAT_VERSION = 1
MANIFEST = "jaxserve.json"
CHECKSUM_BYTES = 32 << 20  # larger files are checked for size only


class FileCheck(NamedTuple):
    nbytes: int
    crc32: int | None  # None for a large file

    @classmethod
    def of(cls, path: Path) -> FileCheck:
        nbytes = path.stat().st_size
        return cls(nbytes, zlib.crc32(path.read_bytes()) if nbytes <= CHECKSUM_BYTES else None)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What jaxserve.json says."""

    config: ModelConfig
    dtype: str  # of the matrices that are not quantised; vectors are float32
    quantization: str | None  # see ops/quant.py; folders made before there was any don't say
    source: str  # file name of what was converted
    shapes: dict[str, tuple[int, ...]]  # by parameter name
    files: dict[str, FileCheck]  # relative path -> what to expect, for all of params/

    def to_json(self) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "dtype": self.dtype,
            "quantization": self.quantization,
            "source": self.source,
            "config": self.config.to_json(),
            "parameters": {name: list(shape) for name, shape in self.shapes.items()},
            "files": self.files,
        }


def is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def read_manifest(folder: Path) -> Manifest:
    """Read jaxserve.json and check the files it lists. Raises WeightsError."""
    path = folder / MANIFEST
    data = read_json(path)
    if (version := data.get("format_version")) != FORMAT_VERSION:
        raise WeightsError(
            f"{path}: format_version is {version!r}, this jaxserve reads {FORMAT_VERSION}: convert again"
        )
    try:
        manifest = Manifest(
            config=ModelConfig.from_json(data["config"]),
            dtype=data["dtype"],
            quantization=data.get("quantization"),
            source=str(data["source"]),
            shapes={name: tuple(int(n) for n in shape) for name, shape in data["parameters"].items()},
            files={name: FileCheck(*check) for name, check in data["files"].items()},
        )
        held_arrays(manifest.shapes, manifest.dtype, manifest.quantization)  # which they suit
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
        raise WeightsError(f"{path}: corrupt: {_first_line(error)}: convert again") from error
    for name, expected in manifest.files.items():
        try:
            found = FileCheck.of(folder / name)
        except (OSError, ValueError):
            raise WeightsError(f"{folder}: {name} is missing: convert again") from None
        if found.nbytes != expected.nbytes:
            raise WeightsError(
                f"{folder}: {name} has {found.nbytes} bytes, {expected.nbytes} are expected: convert again"
            )
        if found != expected:
            raise WeightsError(f"{folder}: {name} is corrupt (its CRC-32 differs): convert again")
    return manifest


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
