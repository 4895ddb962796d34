"""The folder that `jaxserve convert` makes.

    jaxserve.json     format version, model config, dtype, parameters, source, sizes of all other files
    params/           an orbax checkpoint: one flat dict, parameter name -> array
    ...               tokenizer files and chat_template.jinja

Parameters are stored uncompressed: bfloat16 weights shrink by little, and orbax then neither copies nor
decodes them. Sizes are checked when the folder is opened; a flipped bit inside a tensor goes unnoticed,
as it does in GGUF and safetensors files.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve.errors import ConfigError, WeightsError
from jaxserve.models.config import ModelConfig
from jaxserve.weights.loader import param_dtype, serving_dtype
from jaxserve.weights.progress import Progress, watch_folder
from jaxserve.weights.safetensors import read_json

FORMAT_VERSION = 1
MANIFEST = "jaxserve.json"
PARAMS = "params"
CHAT_TEMPLATE = "chat_template.jinja"
WRITE_CONCURRENT_BYTES = 64 << 20
READ_CONCURRENT_BYTES = 64 << 20
READ_GROUP_BYTES = 256 << 20  # restored in one call, between two reports of progress


@dataclass(frozen=True, slots=True)
class Manifest:
    """What jaxserve.json says."""

    config: ModelConfig
    dtype: str  # of the matrices; vectors are float32
    source: str  # file name of what was converted
    shapes: dict[str, tuple[int, ...]]  # by parameter name
    files: dict[str, int]  # relative path -> bytes, of every other file in the folder

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
    context.memory.write_concurrent_bytes = max(WRITE_CONCURRENT_BYTES, _largest(params.values()))
    nbytes = sum(array.nbytes for array in params.values())
    try:
        with context, watch_folder(folder, "writing the checkpoint", nbytes, progress):
            ocp.save((folder / PARAMS).absolute(), dict(params))
    except OSError:
        raise
    except Exception as error:  # tensorstore has no exception types of its own
        raise WeightsError(f"writing the checkpoint failed: {_first_line(error)}") from error
    shapes = {name: array.shape for name, array in params.items()}
    files = {
        str(path.relative_to(folder)): path.stat().st_size
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = Manifest(config, dtype, source, shapes, files)
    (folder / MANIFEST).write_text(json.dumps(manifest.to_json(), indent=1) + "\n")


def read_manifest(folder: Path) -> Manifest:
    """Read jaxserve.json and check that each file it lists is there in full. Raises WeightsError."""
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
            files={str(name): int(size) for name, size in data["files"].items()},
        )
        serving_dtype(manifest.dtype)
    except (KeyError, TypeError, ValueError, AttributeError, ConfigError) as error:
        raise WeightsError(f"{path}: corrupt: {_first_line(error)}: convert again") from error
    for name, size in manifest.files.items():
        try:
            found = (folder / name).stat().st_size
        except (OSError, ValueError):
            raise WeightsError(f"{folder}: {name} is missing: convert again") from None
        if found != size:
            raise WeightsError(f"{folder}: {name} has {found} bytes, {size} are expected: convert again")
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
        name: jax.ShapeDtypeStruct(shape, param_dtype(shape, dtype), sharding=sharding)
        for name, shape in shapes.items()
    }
    path = (folder / PARAMS).absolute()
    context = ocp.Context()
    context.pytree.loading.partial_load = True
    # A limit below the size of one array makes orbax refuse that array. 4: it may be stored as float32.
    context.memory.read_concurrent_bytes = max(READ_CONCURRENT_BYTES, *(4 * prod(s) for s in shapes.values()))
    params: dict[str, jax.Array] = {}
    try:
        with context:
            stored = ocp.metadata(path).metadata
            if not isinstance(stored, dict):  # orbax logs what is wrong and goes on without
                raise WeightsError(f"{path}: orbax's description of it is corrupt: convert again")
            # With partial_load, orbax passes over names that it doesn't find.
            found = {name: tuple(leaf.shape) for name, leaf in stored.items()}
            for name in shapes.keys() | found.keys():
                if shapes.get(name) != found.get(name):
                    raise WeightsError(
                        f"{path}: parameter {name!r}: {MANIFEST} says {_shape(shapes.get(name))}, "
                        f"found {_shape(found.get(name))}: convert again"
                    )
            for group in _groups(abstract):
                if progress is not None:
                    progress("loading weights", len(params), len(abstract))
                params.update(ocp.load(path, {name: abstract[name] for name in group}))
    except WeightsError:
        raise
    except Exception as error:  # orbax and tensorstore raise whatever the defect leads to
        raise WeightsError(f"{path} can't be read: {_first_line(error)}: convert again") from error
    if progress is not None:
        progress("loading weights", len(params), len(abstract))
    return params


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


def _largest(arrays: Any) -> int:
    return max((array.nbytes for array in arrays), default=0)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
