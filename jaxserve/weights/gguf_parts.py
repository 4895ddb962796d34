"""What a GGUF model is made of: its files, and the pieces of tensors that older files keep apart.

llama.cpp's gguf-split writes `name-00001-of-00003.gguf` and so on: the first file has all keys, each has some
of the tensors. Files of early 2024 have one tensor an expert, `blk.0.ffn_up.7.weight`, where later ones have
`blk.0.ffn_up_exps.weight` [experts, out, in].
Source: github.com/ggml-org/llama.cpp, tools/gguf-split and src/llama-model-loader.cpp.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from jaxserve.errors import WeightsError
from jaxserve.weights.gguf_header import Header, TensorEntry, read_header
from jaxserve.weights.source import TensorInfo

_SPLIT_NAME = re.compile(r"(?P<name>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
_EXPERT = re.compile(r"(?P<kind>blk\.\d+\.ffn_(?:gate|up|down))\.(?P<expert>\d+)\.weight")


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of a tensor's values, and which of the model's files it is in."""

    file: int
    entry: TensorEntry


@dataclass(frozen=True, slots=True)
class StoredTensor:
    info: TensorInfo
    pieces: tuple[Piece, ...]  # one after the other along axis 0


def model_name(path: Path) -> str:
    """The name of the model in a GGUF file: that of the file, without the number of a part."""
    match = _SPLIT_NAME.fullmatch(path.name)
    return path.stem if match is None else match["name"]


def part_names(name: str) -> list[str]:
    """Names of all parts of the model of which the file `name` is one; its own where the model isn't split.

    Raises WeightsError for a part with a number that its model can't have.
    """
    if (match := _SPLIT_NAME.fullmatch(name)) is None:
        return [name]
    count = match["count"]
    if not 1 <= int(match["number"]) <= int(count):
        raise WeightsError(f"{name}: no part has this number; they are 00001 to {count}")
    return [f"{match['name']}-{i + 1:05d}-of-{count}.gguf" for i in range(int(count))]


def read_parts(path: Path) -> list[tuple[Path, Header]]:
    """Every file of the model that `path` is a part of, the first one first; most models have one file.

    Raises WeightsError for a part that is missing, or that belongs to something else.
    """
    header = read_header(path)
    count = _number(path, header, "split.count") or 1
    if count <= 1:
        return [(path, header)]
    names = part_names(path.name)
    if len(names) != count:
        raise WeightsError(
            f"{path}: one of {count} parts; they are found by their names, which must be "
            f"NAME-00001-of-{count:05d}.gguf and so on"
        )
    paths = [path.with_name(name) for name in names]
    if missing := [part.name for part in paths if not part.is_file()]:
        raise WeightsError(
            f"{path}: the model has {count} parts, and {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not beside it"
        )
    headers = [header if part == path else read_header(part) for part in paths]
    for i, (part, one) in enumerate(zip(paths, headers)):
        found = _number(part, one, "split.no"), _number(part, one, "split.count")
        if found != (i, count):
            raise WeightsError(
                f"{part}: split.no and split.count are {found[0]} and {found[1]}, not {i} and {count}: "
                "a part of another model"
            )
    total = _number(paths[0], headers[0], "split.tensors.count")
    if total is not None and total != (num := sum(len(one.entries) for one in headers)):
        raise WeightsError(
            f"{paths[0]}: split.tensors.count is {total}, the {count} parts have {num} tensors"
        )
    return list(zip(paths, headers))


def stored_tensors(parts: Iterable[tuple[Path, Header]]) -> dict[str, StoredTensor]:
    """The tensors of all files, by name, with the experts of a layer as one. Raises WeightsError."""
    pieces: dict[str, Piece] = {}
    for file, (path, header) in enumerate(parts):
        for name, entry in header.entries.items():
            if name in pieces:
                raise WeightsError(f"{path}: tensor {name!r} is in another part of the model too")
            pieces[name] = Piece(file, entry)
    stored: dict[str, StoredTensor] = {}
    experts: dict[str, dict[int, Piece]] = {}
    for name, piece in pieces.items():
        if match := _EXPERT.fullmatch(name):
            experts.setdefault(match["kind"] + "_exps.weight", {})[int(match["expert"])] = piece
        else:
            stored[name] = StoredTensor(piece.entry.info, (piece,))
    for name, by_number in experts.items():
        stored[name] = _joined(name, by_number)
    return stored


def _joined(name: str, experts: Mapping[int, Piece]) -> StoredTensor:
    """One tensor of all experts of a layer; a number that is missing makes it too short, which shows."""
    ordered = tuple(experts[i] for i in sorted(experts))
    infos = [piece.entry.info for piece in ordered]
    for info in infos:
        if info.shape != infos[0].shape:
            raise WeightsError(
                f"tensor {info.name!r} is {list(info.shape)}, {infos[0].name!r} is {list(infos[0].shape)}; "
                "the experts of a layer are of one shape"
            )
    nbytes = sum(info.nbytes for info in infos)
    whole = replace(infos[0], name=name, shape=(len(infos), *infos[0].shape), nbytes=nbytes)
    return StoredTensor(whole, ordered)


def _number(path: Path, header: Header, key: str) -> int | None:
    value = header.metadata.get(key)
    if value is not None and not isinstance(value, int):
        raise WeightsError(f"{path}: {key} is {value!r:.80}, expected a number")
    return value
