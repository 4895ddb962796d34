"""The folder that `jaxserve convert` makes.

    jaxserve.json     format version, model config, dtype, parameters, source, files of params/
    params/           an orbax checkpoint: one flat dict, parameter name -> array
    ...               tokenizer files and chat_template.jinja

Parameters are stored uncompressed: bfloat16 weights shrink by little, and orbax then neither copies nor
decodes them. When the folder is opened, the files of params/ are checked for size, and by CRC-32 up to
32 MiB, which covers everything but the tensors of larger models: there a flipped bit goes unnoticed, as
it does in GGUF and safetensors files.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jaxserve.errors import ConfigError, WeightsError
from jaxserve.models.config import ModelConfig
from jaxserve.weights.loader import param_dtype, serving_dtype
from jaxserve.weights.orbax_io import OrbaxError, call_orbax
from jaxserve.weights.progress import Progress, watch_folder
from jaxserve.weights.safetensors import read_json
from jaxserve.weights.staging import reserve

FORMAT_VERSION = 1
MANIFEST = "jaxserve.json"
PARAMS = "params"
CHAT_TEMPLATE = "chat_template.jinja"
CONCURRENT_BYTES = 64 << 20  # in flight between memory and disk
CHECKSUM_BYTES = 32 << 20  # larger files are checked for size only
READ_GROUP_BYTES = 256 << 20  # restored in one call, between two reports of progress


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
    dtype: str  # of the matrices; vectors are float32
    source: str  # file name of what was converted
    shapes: dict[str, tuple[int, ...]]  # by parameter name
    files: dict[str, FileCheck]  # relative path -> what to expect, for all of params/

    def to_json(self) -> dict[str, Any]:
        return {
            "format_version": FORMAT_VERSION,
            "dtype": self.dtype,
            "source": self.source,
            "config": self.config.to_json(),
            "parameters": {name: list(shape) for name, shape in self.shapes.items()},
            "files": self.files,
        }


def is_checkpoint(folder: Path) -> bool:
    return (folder / MANIFEST).is_file()


def write_checkpoint(
    folder: Path,
    params: Mapping[str, jax.Array],
    config: ModelConfig,
    *,
    dtype: str,
    source: str,
    progress: Progress | None = None,
) -> None:
    """Complete `folder`, which already holds the tokenizer's files, with params/ and jaxserve.json.

    Raises OSError, or WeightsError with what orbax says. The caller makes the folder visible.
    """
    from orbax.checkpoint.experimental import v1 as ocp  # takes half a second

    context = ocp.Context()
    context.array.saving.use_compression = False
    context.memory.write_concurrent_bytes = _budget(array.nbytes for array in params.values())
    nbytes = sum(array.nbytes for array in params.values())

    def save() -> None:
        with context, watch_folder(folder, "writing the checkpoint", nbytes, progress):
            ocp.save((folder / PARAMS).absolute(), dict(params))

    reserve(folder, nbytes)
    try:
        call_orbax(save)
    except OrbaxError as error:
        raise WeightsError(f"writing the checkpoint failed: {error}") from error
    shapes = {name: array.shape for name, array in params.items()}
    files = {
        str(path.relative_to(folder)): FileCheck.of(path)
        for path in sorted((folder / PARAMS).rglob("*"))
        if path.is_file()
    }
    manifest = Manifest(config, dtype, source, shapes, files)
    (folder / MANIFEST).write_text(json.dumps(manifest.to_json(), indent=1) + "\n")


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
            source=str(data["source"]),
            shapes={name: tuple(int(n) for n in shape) for name, shape in data["parameters"].items()},
            files={name: FileCheck(*check) for name, check in data["files"].items()},
        )
        serving_dtype(manifest.dtype)
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


def load_checkpoint_params(
    folder: Path, dtype: str, *, manifest: Manifest | None = None, progress: Progress | None = None
) -> dict[str, jax.Array]:
    """Every parameter, by name, cast to `dtype` where it was stored in another.

    Host memory beside the result: one parameter or 64 MiB, whichever is more. Raises WeightsError for a
    checkpoint that is corrupt, truncated, or not what its manifest says.
    """
    from orbax.checkpoint.experimental import v1 as ocp  # takes half a second

    shapes = (manifest or read_manifest(folder)).shapes
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = {
        name: jax.ShapeDtypeStruct(shape, param_dtype(name, shape, dtype), sharding=sharding)
        for name, shape in shapes.items()
    }
    path = (folder / PARAMS).absolute()
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    # Stored as float32 at most.
    context.memory.read_concurrent_bytes = _budget(4 * prod(shape) for shape in shapes.values())
    params: dict[str, jax.Array] = {}

    def load() -> None:
        with context:
            _check_shapes(path, ocp.metadata(path).metadata, shapes)
            for group in _groups(abstract):
                if progress is not None:
                    progress("loading weights", len(params), len(abstract))
                params.update(ocp.load(path, {name: abstract[name] for name in group}))

    try:
        call_orbax(load)
    except (OrbaxError, OSError) as error:
        raise WeightsError(f"{path} can't be read: {error}: convert again") from error
    if progress is not None:
        progress("loading weights", len(params), len(abstract))
    return {name: params[name] for name in shapes}  # orbax sorts by name


def _check_shapes(path: Path, stored: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises WeightsError unless orbax's own description of the checkpoint agrees with the manifest."""
    if not isinstance(stored, dict):  # orbax logs what is wrong and goes on without
        raise WeightsError(f"{path}: orbax's description of it is corrupt: convert again")
    found = {name: tuple(leaf.shape) for name, leaf in stored.items()}
    for name in shapes.keys() | found.keys():
        if shapes.get(name) != found.get(name):
            raise WeightsError(
                f"{path}: parameter {name!r}: {MANIFEST} says {_shape(shapes.get(name))}, "
                f"found {_shape(found.get(name))}: convert again"
            )


def _groups(abstract: Mapping[str, jax.ShapeDtypeStruct]) -> Iterator[list[str]]:
    group: list[str] = []
    nbytes = 0
    for name, leaf in abstract.items():
        group.append(name)
        nbytes += prod(leaf.shape) * np.dtype(leaf.dtype).itemsize
        if nbytes >= READ_GROUP_BYTES:
            yield group
            group, nbytes = [], 0
    if group:
        yield group


def _shape(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else str(list(shape))


def _budget(sizes: Iterable[int]) -> int:
    """Bytes that orbax may have in flight. It refuses an array that is not smaller than this."""
    return max(CONCURRENT_BYTES, max(sizes, default=0) + 1)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
