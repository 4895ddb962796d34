"""What a model's files say of it, and whether it would load: from headers and descriptions alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.errors import JaxserveError, WeightsError
from jaxserve.models.config import ModelConfig, RopeScaling
from jaxserve.models.registry import family_for
from jaxserve.weights.gguf import GGUFSource
from jaxserve.weights.loader import held_arrays
from jaxserve.weights.manifest import is_checkpoint, read_manifest
from jaxserve.weights.model_files import CHECKPOINTS, find_model, open_model
from jaxserve.weights.safetensors import SafetensorsSource

if TYPE_CHECKING:
    from jaxserve.tokenizer.base import Tokenizer


@dataclass(frozen=True, slots=True)
class StoredAs:
    """The tensors of one type in a file."""

    tensors: int
    values: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    kind: str
    size: int  # ids, which may be fewer than the rows of the embedding


@dataclass(frozen=True, slots=True)
class Inspection:
    """None stands for what could not be read; `problems` say why."""

    path: str
    format: str  # gguf, safetensors or orbax
    architecture: str | None  # as the file names it
    family: str | None  # of those supported
    parameters: int | None
    nbytes: int | None  # of all tensors, as stored
    types: dict[str, StoredAs]
    quantization: str | None  # of an orbax folder, and so what it is served in
    config: ModelConfig | None
    tokenizer: TokenizerInfo | None
    chat_templates: dict[str, str]  # sources by name
    problems: tuple[str, ...]

    @property
    def would_load(self) -> bool:
        return not self.problems

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "would_load": self.would_load}


def inspect_model(model: str | Path, *, checkpoints: Path = CHECKPOINTS) -> Inspection:
    """Look at what `open_model` would open; no tensor is read, but for a few RoPE factors of GGUF.

    Raises WeightsError only where there is no such model.
    """
    path = find_model(model, checkpoints=checkpoints)
    problems: list[str] = []
    description = _Description()
    try:
        description = _describe(path)
    except WeightsError as error:
        problems.append(str(error))
    config, count = None, None
    if not problems:
        try:
            files = open_model(path)
            config, count = files.config, sum(map(prod, files.param_shapes.values()))
            files.close()
        except WeightsError as error:
            problems.append(str(error))
    tokenizer, templates = None, {}
    try:
        loaded = _load_tokenizer(path, description.metadata)
        tokenizer = TokenizerInfo(_kind(loaded, description.metadata), loaded.vocab_size)
        templates = _templates(path, description.metadata, loaded)
    except JaxserveError as error:
        if description.types or path.is_dir():  # else the file is none, which was said
            problems.append(str(error))
    types = description.types
    return Inspection(
        path=str(path),
        format=_format(path),
        architecture=description.architecture,
        family=description.family,
        parameters=count or (sum(one.values for one in types.values()) if types else None),
        nbytes=sum(one.nbytes for one in types.values()) if types else None,
        types=types,
        quantization=description.quantization,
        config=config,
        tokenizer=tokenizer,
        chat_templates=templates,
        problems=tuple(problems),
    )


@dataclass(frozen=True, slots=True)
class _Description:
    architecture: str | None = None
    family: str | None = None
    types: dict[str, StoredAs] = field(default_factory=dict)
    metadata: Mapping[str, Any] | None = None  # of a GGUF file
    quantization: str | None = None


def _format(path: Path) -> str:
    if not path.is_dir():
        return "gguf"
    return "orbax" if is_checkpoint(path) else "safetensors"


def _describe(path: Path) -> _Description:
    """What can be said without knowing the family. Raises WeightsError."""
    if _format(path) == "orbax":
        manifest = read_manifest(path)
        held = held_arrays(manifest.shapes, manifest.dtype, manifest.quantization).values()
        stored = ((one.dtype.name, one.size, one.size * one.dtype.itemsize) for one in held)
        return _Description(
            None, manifest.config.family, _by_type(stored), quantization=manifest.quantization
        )
    source = GGUFSource(path) if _format(path) == "gguf" else SafetensorsSource(path)
    source.close()  # headers are all that is needed
    types = _by_type((info.dtype, prod(info.shape), info.nbytes) for info in source.tensors.values())
    if source.format == "gguf":
        named, metadata = source.metadata.get("general.architecture"), source.metadata
    else:
        named, metadata = source.metadata.get("architectures"), None
    if isinstance(named, list):
        named = ", ".join(map(str, named))
    try:
        family = family_for(source).name
    except WeightsError:  # `open_model` says so too
        family = None
    return _Description(None if named is None else str(named), family, types, metadata)


def _by_type(tensors: Iterable[tuple[str, int, int]]) -> dict[str, StoredAs]:
    """From the type, values and bytes of each tensor; those with most bytes first."""
    found: dict[str, StoredAs] = {}
    for dtype, values, nbytes in tensors:
        one = found.get(dtype, StoredAs(0, 0, 0))
        found[dtype] = StoredAs(one.tensors + 1, one.values + values, one.nbytes + nbytes)
    return dict(sorted(found.items(), key=lambda item: -item[1].nbytes))


def _load_tokenizer(path: Path, metadata: Mapping[str, Any] | None) -> Tokenizer:
    from jaxserve.tokenizer import load

    if path.is_dir():
        return load.from_folder(path)
    return load.from_gguf(metadata or {})


def _kind(tokenizer: Tokenizer, metadata: Mapping[str, Any] | None) -> str:
    from jaxserve.tokenizer.sentencepiece import SentencePieceTokenizer

    kind = "SentencePiece" if isinstance(tokenizer, SentencePieceTokenizer) else "BPE"
    pre = None if metadata is None or kind != "BPE" else metadata.get("tokenizer.ggml.pre")
    return kind if pre is None else f"{kind}, words cut as {pre}"


def _templates(path: Path, metadata: Mapping[str, Any] | None, tokenizer: Tokenizer) -> dict[str, str]:
    """The sources, after a look at whether they are templates at all."""
    from jaxserve.tokenizer import template_files
    from jaxserve.tokenizer.chat import chat_template

    if metadata is None:
        sources = template_files.templates_from_folder(path)
    else:
        sources = template_files.templates_from_gguf(metadata)
    for source in sources.values():
        chat_template(tokenizer, source)
    return sources


def rope_in_words(config: ModelConfig) -> str:
    """How the layers turn heads, kind by kind."""
    kinds = Counter((layer.rope_theta, layer.rope) for layer in config.layers)
    return "; ".join(
        _one_rope(theta, scaling) + (f" in {count} layers" if len(kinds) > 1 else "")
        for (theta, scaling), count in kinds.items()
    )


def _one_rope(theta: float | None, scaling: RopeScaling) -> str:
    if theta is None:
        return "none"
    said = f"theta {theta:.12g}"
    for name, factors in (("factors", scaling.factors), ("factors of long contexts", scaling.long_factors)):
        if factors:
            said += f", {name} {min(factors):g} to {max(factors):g}"
    if scaling.ntk_factor is not None:
        said += f", dynamic NTK {scaling.ntk_factor:g}"
    if scaling.original is not None:
        said += f", made for {scaling.original} tokens"
    return said


def windows_in_words(config: ModelConfig) -> str:
    windows = Counter(layer.window for layer in config.layers if layer.window is not None)
    said = [f"{window} tokens in {count} of {config.num_layers} layers" for window, count in windows.items()]
    return ", ".join(said) or "none"
