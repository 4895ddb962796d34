"""The folder that `jaxserve convert` makes.

    jaxserve.json     format version, model config, dtype, parameters, source, files of params/
    params/           an orbax checkpoint: parameter name -> number of the piece -> array
    ...               tokenizer files, chat templates, generation_config.json

A parameter is cut along axis 0 into pieces of about 32 MiB, which are joined again when it is loaded:
orbax holds every array that it reads or writes at least once more in memory, and the layers of a model,
stacked, are a few arrays of its whole size. Pieces are stored uncompressed: bfloat16 weights shrink by
little, and orbax then neither copies nor decodes them.

When the folder is opened, the files of params/ are checked for size, and by CRC-32 up to 32 MiB, which
covers everything but the tensors of larger models: there a flipped bit goes unnoticed, as it does in
GGUF and safetensors files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from math import gcd, prod
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve.errors import ConfigError, WeightsError
from jaxserve.models.config import ModelConfig
from jaxserve.ops.quant import scale_name
from jaxserve.weights.loader import ALIGNMENT, arrays_of, empty_param, fill, held_arrays, rows_of
from jaxserve.weights.manifest import MANIFEST, FileCheck, Manifest, read_manifest
from jaxserve.weights.orbax_io import OrbaxError, call_orbax
from jaxserve.weights.progress import Progress, watch_folder
from jaxserve.weights.staging import reserve

PARAMS = "params"
PIECE_BYTES = 32 << 20
CONCURRENT_BYTES = 64 << 20  # that orbax may have in flight between memory and disk, or read in one call


def write_checkpoint(
    folder: Path,
    params: Mapping[str, np.ndarray],
    config: ModelConfig,
    *,
    dtype: str,
    quantization: str | None = None,
    source: str,
    progress: Progress | None = None,
) -> None:
    """Complete `folder`, which already holds the tokenizer's files, with params/ and jaxserve.json.

    Raises OSError, or WeightsError with what orbax says. The caller makes the folder visible.
    """
    from orbax.checkpoint.experimental import v1 as ocp  # takes half a second

    # orbax copies NumPy arrays before it writes them, but not jax arrays, which the CPU backend lays over
    # the very same memory where it is aligned.
    cpu = jax.local_devices(backend="cpu")[0]
    tree = {
        name: {key: jax.device_put(piece, cpu) for key, piece in _pieces(array)}
        for name, array in params.items()
    }
    context = ocp.Context()
    context.array.saving.use_compression = False
    context.memory.write_concurrent_bytes = _budget(leaf.nbytes for leaf in jax.tree.leaves(tree))
    nbytes = sum(array.nbytes for array in params.values())

    def save() -> None:
        with context, watch_folder(folder, "writing the checkpoint", nbytes, progress):
            ocp.save((folder / PARAMS).absolute(), tree)

    reserve(folder, nbytes)
    try:
        call_orbax(save)
    except OrbaxError as error:
        raise WeightsError(f"writing the checkpoint failed: {error}") from error
    scales = {scale_name(name) for name in params}
    shapes = {name: array.shape for name, array in params.items() if name not in scales}
    files = {
        str(path.relative_to(folder)): FileCheck.of(path)
        for path in sorted((folder / PARAMS).rglob("*"))
        if path.is_file()
    }
    manifest = Manifest(config, dtype, quantization, source, shapes, files)
    (folder / MANIFEST).write_text(json.dumps(manifest.to_json(), indent=1) + "\n")


def _pieces(array: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Views of at most PIECE_BYTES (but one row at least), each of which begins on an aligned address."""
    if array.nbytes <= PIECE_BYTES:
        yield _key(0), array
        return
    row = array.nbytes // array.shape[0]
    step = ALIGNMENT // gcd(ALIGNMENT, row)  # rows from one aligned address to the next
    rows = max(PIECE_BYTES // row // step, 1) * step
    for i, start in enumerate(range(0, array.shape[0], rows)):
        yield _key(i), array[start : start + rows]


def _key(piece: int) -> str:
    return f"{piece:06d}"


def load_checkpoint_params(
    folder: Path,
    dtype: str,
    *,
    quantization: str | None = None,
    manifest: Manifest | None = None,
    progress: Progress | None = None,
) -> dict[str, jax.Array]:
    """Every parameter, by name, on the first device. Raises as `read_checkpoint_params` does."""
    device = jax.devices()[0]
    found = read_checkpoint_params(
        folder, dtype, quantization=quantization, manifest=manifest, progress=progress
    )
    return {name: jax.device_put(array, device) for name, array in found}


def read_checkpoint_params(
    folder: Path,
    dtype: str,
    *,
    quantization: str | None = None,
    manifest: Manifest | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[str, np.ndarray]]:
    """Names and arrays of the parameters, one by one, as loader's `read_params` gives them.

    They are cast to `dtype` where they were stored in another, and quantised where they weren't; None takes
    them as they are. Memory beside the array: what orbax has in flight. Raises WeightsError for a checkpoint
    that is corrupt, truncated, or not what its manifest says; ConfigError for one that is quantised
    otherwise.
    """
    from orbax.checkpoint.experimental import v1 as ocp  # takes half a second

    manifest = manifest or read_manifest(folder)
    quantization = agreed_quantization(folder, manifest.quantization, quantization)
    stored_arrays = held_arrays(manifest.shapes, manifest.dtype, manifest.quantization)
    held = held_arrays(manifest.shapes, dtype, quantization)
    shapes = {name: array.shape for name, array in stored_arrays.items()}
    path = (folder / PARAMS).absolute()
    context = ocp.Context()
    context.pytree.loading.partial_load = True

    def call(work: Callable[[], Any]) -> Any:
        try:
            with context:
                return call_orbax(work)
        except (OrbaxError, OSError) as error:
            raise WeightsError(f"{path} can't be read: {error}: convert again") from error

    stored = call(lambda: ocp.metadata(path).metadata)
    _check_shapes(path, stored, shapes)
    context.memory.read_concurrent_bytes = _budget(_nbytes(piece) for piece in jax.tree.leaves(stored))
    for i, name in enumerate(shapes):
        if progress is not None:
            progress("loading weights", i, len(shapes))
        # Stored scales are read by themselves, and so are their weights.
        out = empty_param(name, held if manifest.quantization is None else {name: held[name]})
        row = 0
        for group in _groups(stored[name]):
            abstract = {key: np.empty(leaf.shape, leaf.dtype) for key, leaf in group.items()}
            loaded = call(partial(ocp.load, path, {name: abstract}))[name]
            for key in group:
                end = row + len(loaded[key])
                fill(rows_of(out, row, end), loaded[key])
                row = end
        yield from arrays_of(name, out)
    if progress is not None:
        progress("loading weights", len(shapes), len(shapes))


def agreed_quantization(path: Path, stored: str | None, asked: str | None) -> str | None:
    """How weights that are `stored` as one are to be served as `asked`, None being no wish.

    Raises ConfigError where they are stored in int8 of another kind.
    """
    if stored is not None and asked not in (None, stored):
        raise ConfigError(
            f"quantization={asked}: {path} is stored as {stored}, and is served as that without the option; "
            f"for {asked}, convert what it was made from again"
        )
    return stored or asked


def _check_shapes(path: Path, stored: Any, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises WeightsError unless orbax's own description of the checkpoint agrees with the manifest."""
    if not isinstance(stored, dict):  # orbax logs what is wrong and goes on without
        raise WeightsError(f"{path}: orbax's description of it is corrupt: convert again")
    found = {name: _joined_shape(pieces) for name, pieces in stored.items()}
    for name in shapes.keys() | found.keys():
        if shapes.get(name) != found.get(name):
            raise WeightsError(
                f"{path}: parameter {name!r}: {MANIFEST} says {_shape(shapes.get(name))}, "
                f"found {_shape(found.get(name))}: convert again"
            )


def _joined_shape(pieces: Any) -> tuple[int, ...] | None:
    """The shape of a parameter from its pieces; None where they can't be joined."""
    if not isinstance(pieces, dict) or list(pieces) != [_key(i) for i in range(len(pieces))]:
        return None
    shapes = [tuple(piece.shape) for piece in pieces.values()]
    if len(shapes) == 1:
        return shapes[0]
    if not all(shape and shape[1:] == shapes[0][1:] for shape in shapes):
        return None
    return sum(shape[0] for shape in shapes), *shapes[0][1:]


def _groups(pieces: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Pieces to read in one call, in order: as many as make CONCURRENT_BYTES."""
    group: dict[str, Any] = {}
    for key, piece in pieces.items():
        group[key] = piece
        if sum(map(_nbytes, group.values())) >= CONCURRENT_BYTES:
            yield group
            group = {}
    if group:
        yield group


def _nbytes(leaf: Any) -> int:
    return prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def _shape(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else str(list(shape))


def _budget(sizes: Iterable[int]) -> int:
    """Bytes that orbax may have in flight. It refuses an array that is not smaller than this."""
    return max(CONCURRENT_BYTES, max(sizes, default=0) + 1)
