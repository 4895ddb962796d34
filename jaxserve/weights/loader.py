"""From a tensor source to the decoder's parameters, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.errors import ConfigError, WeightsError
from jaxserve.models.family import Part, WeightRule
from jaxserve.weights.progress import Progress
from jaxserve.weights.source import TensorSource

DTYPES = ("bfloat16", "float32")
BLOCK_ELEMENTS = 1 << 20  # read and cast at a time
ALIGNMENT = 64  # the CPU backend takes over a buffer aligned like this; any other is copied
NAMES_SHOWN = 5


def serving_dtype(name: str) -> np.dtype:
    """The dtype called `name`. Raises ConfigError for one that jaxserve does not serve in."""
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not supported: one of {', '.join(DTYPES)}")
    return jnp.dtype(name)


def param_dtype(name: str, shape: Sequence[int], dtype: str) -> np.dtype:
    """What a parameter is kept in: vectors, those of all layers too, stay float32, others take `dtype`."""
    vector = len(shape) <= 1 or name.endswith(("norm.weight", "bias", ".sinks"))
    return np.dtype(np.float32) if vector else serving_dtype(dtype)


def load_params(
    source: TensorSource,
    rules: Sequence[WeightRule],
    ignored: frozenset[str],
    dtype: str,
    *,
    progress: Progress | None = None,
    place: Callable[[np.ndarray], jax.Array] | None = None,
) -> dict[str, jax.Array]:
    """Every parameter of `rules` from `source`, by `WeightRule.param`.

    `place` puts a finished array on a device and may keep it; by default it goes to the first device.
    Raises as `read_params` does.
    """
    place = place or partial(jax.device_put, device=jax.devices()[0])
    return {
        name: place(array) for name, array in read_params(source, rules, ignored, dtype, progress=progress)
    }


def read_params(
    source: TensorSource,
    rules: Sequence[WeightRule],
    ignored: frozenset[str],
    dtype: str,
    *,
    progress: Progress | None = None,
) -> Iterator[tuple[str, np.ndarray]]:
    """Names and arrays of the parameters, one by one, each aligned and in memory of its own.

    Memory beside the array: a block of rows, and the float32 form of a part whose transform needs all. Names
    and shapes are checked before the first tensor is read; a tensor that is missing, of a wrong shape, or
    in neither `rules` nor `ignored` raises WeightsError.
    """
    check_tensors(source, rules, ignored)
    total, done = sum(len(rule.parts) for rule in rules), 0

    def read_part() -> None:
        nonlocal done
        if progress is not None:
            progress("loading weights", done, total)
        done += 1

    for rule in rules:
        yield rule.param, _read_param(source, rule, param_dtype(rule.param, rule.shape, dtype), read_part)
    if progress is not None:
        progress("loading weights", total, total)


def check_tensors(source: TensorSource, rules: Sequence[WeightRule], ignored: frozenset[str]) -> None:
    """Raises WeightsError unless the source holds what the rules want, in their shapes, and no more."""
    expected = {part.name: (part, rule) for rule in rules for part in rule.parts}
    missing = [name for name in expected if name not in source.tensors]
    if missing:
        part, rule = expected[missing[0]]
        raise WeightsError(
            f"{source.path}: {_count(missing, 'missing')}; the first is expected with the shape "
            f"{list(part.shape)} for parameter {rule.param}"
        )
    wrong = [
        f"{name!r}: expected {list(part.shape)} for parameter {rule.param}, "
        f"found {list(source.tensors[name].shape)}"
        for name, (part, rule) in expected.items()
        if source.tensors[name].shape != tuple(part.shape)
    ]
    if wrong:
        shown = "; ".join(wrong[:NAMES_SHOWN])
        raise WeightsError(f"{source.path}: {len(wrong)} tensors of a wrong shape: {shown}")
    extra = [name for name in source.tensors if name not in expected and name not in ignored]
    if extra:
        shape = list(source.tensors[extra[0]].shape)
        raise WeightsError(
            f"{source.path}: {_count(extra, 'not part of this model')}; the first has the shape {shape}, "
            "where no tensor of that name is expected"
        )


def _count(names: Sequence[str], what: str) -> str:
    shown = ", ".join(repr(name) for name in names[:NAMES_SHOWN])
    more = f" and {len(names) - NAMES_SHOWN} more" if len(names) > NAMES_SHOWN else ""
    return f"{len(names)} tensor{'s'[:len(names) > 1]} {what}: {shown}{more}"


def _read_param(
    source: TensorSource, rule: WeightRule, dtype: np.dtype, started: Callable[[], None]
) -> np.ndarray:
    """The whole parameter; `started` is called before each part is read."""
    out = aligned_empty(rule.shape, dtype)
    if len(rule.parts) == 1:
        started()
        _read_part(source, rule.parts[0], out.reshape(rule.parts[0].rows_shape))
        return out
    joined, row = out.reshape(-1, *rule.parts[0].rows_shape[1:]), 0  # a view: `out` is contiguous
    for part in rule.parts:
        started()
        rows = part.rows_shape[0]
        _read_part(source, part, joined[row : row + rows])
        row += rows
    if row != joined.shape[0]:
        raise ValueError(f"{rule.param}: its parts have {row} rows, its shape is {rule.shape}")
    return out


def _read_part(source: TensorSource, part: Part, out: np.ndarray) -> None:
    """Fill `out`, a view of the parameter, casting on assignment (to nearest, ties to even)."""
    if out.ndim > 0 and out.shape == tuple(part.rows_shape) and (part.transform is None or part.by_row):
        rows = max(1, BLOCK_ELEMENTS // prod(part.shape[1:]))
        for start in range(0, part.shape[0], rows):
            stop = min(start + rows, part.shape[0])
            _fill(out[start:stop], part, source.read_rows(part.name, start, stop))
    else:
        _fill(out, part, source.read(part.name))


def _fill(out: np.ndarray, part: Part, values: np.ndarray) -> None:
    if part.transform is not None:
        values = part.transform(values.astype(np.float32, copy=False))
    if values.shape != out.shape:
        raise ValueError(f"{part.name}: its transform gives {values.shape}, {out.shape} is needed")
    out[...] = values


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that a CPU device can take over without a copy."""
    nbytes = prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + nbytes].view(dtype).reshape(shape)
