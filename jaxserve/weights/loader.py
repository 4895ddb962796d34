"""From a tensor source to the decoder's parameters, one tensor at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.errors import ConfigError, WeightsError
from jaxserve.models.family import Part, WeightRule
from jaxserve.ops.quant import GROUPS, Int8, is_quantised, quantise_into, scale_name, scale_shape
from jaxserve.weights.progress import Progress
from jaxserve.weights.source import TensorSource

DTYPES = ("bfloat16", "float32")
BLOCK_ELEMENTS = 1 << 20  # read and cast at a time
ALIGNMENT = 64  # the CPU backend takes over a buffer aligned like this; any other is copied
NAMES_SHOWN = 5
Param = np.ndarray | Int8[np.ndarray]  # in host memory


def serving_dtype(name: str) -> np.dtype:
    """The dtype called `name`. Raises ConfigError for one that jaxserve does not serve in."""
    if name not in DTYPES:
        raise ConfigError(f"dtype {name!r} is not supported: one of {', '.join(DTYPES)}")
    return jnp.dtype(name)


def param_dtype(name: str, shape: Sequence[int], dtype: str) -> np.dtype:
    """What a parameter is kept in: vectors, those of all layers too, stay float32, others take `dtype`."""
    vector = len(shape) <= 1 or name.endswith(("norm.weight", "bias", ".sinks"))
    return np.dtype(np.float32) if vector else serving_dtype(dtype)


def known_quantization(name: str | None) -> str | None:
    """`name`, or None for floats. Raises ConfigError for one that jaxserve does not have."""
    if name is not None and name not in GROUPS:
        raise ConfigError(f"quantization {name!r} is not supported: one of {', '.join(GROUPS)}")
    return name


def held_arrays(
    shapes: Mapping[str, Sequence[int]], dtype: str, quantization: str | None
) -> dict[str, jax.ShapeDtypeStruct]:
    """By name the arrays that parameters of such `shapes` are kept in: one each, an int8 weight's scales too.

    Raises ConfigError for a dtype or quantization that jaxserve does not have, or that suits not all of them.
    """
    held, known_dtype = {}, serving_dtype(dtype)
    for name, shape in shapes.items():
        if known_quantization(quantization) is None or not is_quantised(name, shape):
            held[name] = jax.ShapeDtypeStruct(tuple(shape), param_dtype(name, shape, known_dtype.name))
            continue
        assert quantization is not None
        held[name] = jax.ShapeDtypeStruct(tuple(shape), np.int8)
        held[scale_name(name)] = jax.ShapeDtypeStruct(scale_shape(name, shape, quantization), np.float32)
    return held


def held_bytes(shapes: Mapping[str, Sequence[int]], dtype: str, quantization: str | None) -> int:
    """Of all `held_arrays`. Errors as theirs."""
    held = held_arrays(shapes, dtype, quantization).values()
    return sum(array.size * array.dtype.itemsize for array in held)


def load_params(
    source: TensorSource,
    rules: Sequence[WeightRule],
    ignored: frozenset[str],
    dtype: str,
    *,
    quantization: str | None = None,
    progress: Progress | None = None,
    place: Callable[[np.ndarray], jax.Array] | None = None,
) -> dict[str, jax.Array]:
    """Every parameter of `rules` from `source`, by `WeightRule.param`; the scales of int8 ones beside them.

    `place` puts a finished array on a device and may keep it; by default it goes to the first device.
    Raises as `read_params` does.
    """
    place = place or partial(jax.device_put, device=jax.devices()[0])
    found = read_params(source, rules, ignored, dtype, quantization=quantization, progress=progress)
    return {name: place(array) for name, array in found}


def read_params(
    source: TensorSource,
    rules: Sequence[WeightRule],
    ignored: frozenset[str],
    dtype: str,
    *,
    quantization: str | None = None,
    progress: Progress | None = None,
) -> Iterator[tuple[str, np.ndarray]]:
    """Names and arrays of the parameters, one by one, each aligned and in memory of its own.

    They are those of `held_arrays`, whose errors it raises. Memory beside the array: a block of rows, and the
    float32 form of a part whose transform needs all. Names and shapes are checked before the first tensor is
    read; a tensor that is missing, of a wrong shape, or in neither `rules` nor `ignored` raises WeightsError.
    """
    check_tensors(source, rules, ignored)
    held = held_arrays({rule.param: rule.shape for rule in rules}, dtype, quantization)
    total, done = sum(len(rule.parts) for rule in rules), 0

    def read_part() -> None:
        nonlocal done
        if progress is not None:
            progress("loading weights", done, total)
        done += 1

    for rule in rules:
        param = _read_param(source, rule, empty_param(rule.param, held), read_part)
        yield from arrays_of(rule.param, param)
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


def empty_param(name: str, held: Mapping[str, jax.ShapeDtypeStruct]) -> Param:
    """An uninitialised parameter, in int8 where `held` has scales of it."""
    weight, scales = held[name], held.get(scale_name(name))
    values = aligned_empty(weight.shape, weight.dtype)
    return values if scales is None else Int8(values, aligned_empty(scales.shape, scales.dtype))


def arrays_of(name: str, param: Param) -> Iterator[tuple[str, np.ndarray]]:
    """Names and arrays of one parameter."""
    if isinstance(param, Int8):
        yield name, param.values
        yield scale_name(name), param.scales
    else:
        yield name, param


def rows_of(param: Param, start: int, stop: int) -> Param:
    """A view of some of axis 0."""
    if isinstance(param, Int8):
        return Int8(param.values[start:stop], param.scales[start:stop])
    return param[start:stop]


def fill(out: Param, values: np.ndarray) -> None:
    """Write `values`, of out's shape, casting (to nearest, ties to even) or quantising."""
    if isinstance(out, Int8):
        quantise_into(values, out)
    else:
        out[...] = values


def _read_param(source: TensorSource, rule: WeightRule, out: Param, started: Callable[[], None]) -> Param:
    """`out`, which is the whole parameter, filled; `started` is called before each part is read."""
    if len(rule.parts) == 1:
        started()
        _read_part(source, rule.parts[0], _viewed(out, rule.parts[0].rows_shape))
        return out
    joined, row = _viewed(out, (-1, *rule.parts[0].rows_shape[1:])), 0
    for part in rule.parts:
        started()
        rows = part.rows_shape[0]
        _read_part(source, part, rows_of(joined, row, row + rows))
        row += rows
    if row != prod(rule.shape) // prod(rule.parts[0].rows_shape[1:]):
        raise ValueError(f"{rule.param}: its parts have {row} rows, its shape is {rule.shape}")
    return out


def _viewed(param: Param, shape: Sequence[int]) -> Param:
    """`param` with another shape; a view, as parameters are contiguous."""
    if isinstance(param, Int8):
        scales = param.scales.reshape(*shape[:-1], param.scales.shape[-1])
        return Int8(param.values.reshape(shape), scales)
    return param.reshape(shape)


def _read_part(source: TensorSource, part: Part, out: Param) -> None:
    """Fill `out`, a view of the parameter."""
    shape = _shape(out)
    if shape and shape == tuple(part.rows_shape) and (part.transform is None or part.by_row):
        rows = max(1, BLOCK_ELEMENTS // prod(part.shape[1:]))
        for start in range(0, part.shape[0], rows):
            stop = min(start + rows, part.shape[0])
            _fill(rows_of(out, start, stop), part, source.read_rows(part.name, start, stop))
    else:
        _fill(out, part, source.read(part.name))


def _fill(out: Param, part: Part, values: np.ndarray) -> None:
    if part.transform is not None:
        values = part.transform(values.astype(np.float32, copy=False))
    if values.shape != (shape := _shape(out)):
        raise ValueError(f"{part.name}: its transform gives {values.shape}, {shape} is needed")
    fill(out, values)


def _shape(param: Param) -> tuple[int, ...]:
    return (param.values if isinstance(param, Int8) else param).shape


def aligned_empty(shape: Sequence[int], dtype: np.dtype) -> np.ndarray:
    """An uninitialised array that a CPU device can take over without a copy."""
    nbytes = prod(shape) * dtype.itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    skip = -raw.ctypes.data % ALIGNMENT
    return raw[skip : skip + nbytes].view(dtype).reshape(shape)
