"""A model on the disk, whatever its format: its config, parameters, tokenizer and chat template."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

import jax
import numpy as np

from jaxserve.errors import WeightsError
from jaxserve.models.config import ModelConfig
from jaxserve.models.family import fitted
from jaxserve.models.registry import family_for, family_named
from jaxserve.weights.checkpoint import (
    agreed_quantization,
    load_checkpoint_params,
    read_checkpoint_params,
)
from jaxserve.weights.gguf import GGUFSource
from jaxserve.weights.gguf_parts import model_name
from jaxserve.weights.loader import check_tensors, known_quantization, load_params, read_params
from jaxserve.weights.manifest import is_checkpoint, read_manifest
from jaxserve.weights.progress import Progress
from jaxserve.weights.quantised import dequantised
from jaxserve.weights.safetensors import SafetensorsSource
from jaxserve.weights.source import TensorSource

if TYPE_CHECKING:
    from jaxserve.tokenizer.base import Tokenizer
    from jaxserve.tokenizer.generation import GenerationConfig

CHECKPOINTS = Path("checkpoints")


class ModelFiles(Protocol):
    """An opened model: its description is read and checked, its tensors are not read yet."""

    path: Path
    format: Literal["gguf", "safetensors", "orbax"]
    name: str  # what to call the model when nobody says otherwise
    config: ModelConfig
    param_shapes: dict[str, tuple[int, ...]]  # by parameter name
    quantization: str | None  # that the weights are stored in, one of ops/quant.py's

    def load_params(
        self, dtype: str, progress: Progress | None = None, quantization: str | None = None
    ) -> dict[str, jax.Array]:
        """Parameters by flat name on the first device; matrices in `dtype`, vectors in float32.

        With `quantization`, or where they are stored so, dense weights are int8, and their scales are
        parameters too: loader's `held_arrays` of `served_quantization`, whose errors it raises.
        """
        ...

    def read_params(
        self, dtype: str, progress: Progress | None = None, quantization: str | None = None
    ) -> Iterator[tuple[str, np.ndarray]]:
        """The same, one by one, in host memory; the receiver may keep them."""
        ...

    def load_tokenizer(self) -> Tokenizer: ...

    def chat_templates(self) -> dict[str, str]:
        """Jinja2 sources by name, the main one as "default"; empty for a model that has no template."""
        ...

    def generation_config(self) -> GenerationConfig:
        """How the model's authors want it sampled."""
        ...

    def close(self) -> None: ...


def open_model(model: str | Path, *, checkpoints: Path = CHECKPOINTS) -> ModelFiles:
    """Open a .gguf file, a Hugging Face folder, a converted folder, or a name in `checkpoints`.

    A name stands for the converted folder of that name, or else for the file or folder that `pull` made
    of it. Raises WeightsError when there is none, and for one that is corrupt or not supported.
    """
    path = find_model(model, checkpoints=checkpoints)
    if path.is_dir() and is_checkpoint(path):
        return _Converted(path)
    if path.suffix == ".safetensors":
        raise WeightsError(f"{path}: name its folder, which also holds config.json and the tokenizer")
    return _Unconverted(SafetensorsSource(path) if path.is_dir() else GGUFSource(path))


def served_quantization(files: ModelFiles, asked: str | None) -> str | None:
    """What a model's weights are served in when `asked` for one, or, with None, for none.

    Raises ConfigError for one that jaxserve does not have, or that its weights can't be had in any more.
    """
    return agreed_quantization(files.path, files.quantization, known_quantization(asked))


def find_model(model: str | Path, *, checkpoints: Path = CHECKPOINTS) -> Path:
    """Where `open_model` would look. Raises WeightsError that says how to get the model."""
    candidates = [Path(model)]
    name = str(model)
    if not Path(model).is_absolute():
        flat = name.replace("/", "--").replace(":", "--")
        candidates += [checkpoints / name, checkpoints / f"{name}.gguf", checkpoints / flat]
    for path in candidates:
        if path.is_file() or (path.is_dir() and (is_checkpoint(path) or (path / "config.json").is_file())):
            return path
    for path in candidates:
        if path.is_dir():
            raise WeightsError(
                f"{path} is no model: a folder needs a jaxserve.json (made by `jaxserve convert`) "
                "or a config.json (Hugging Face)"
            )
    raise WeightsError(
        f"model {name!r} not found: no such file or folder, nor in {checkpoints}/; "
        f"`jaxserve pull {name}` fetches one that has a known name"
    )


class _Unconverted:
    """A GGUF file or a Hugging Face folder."""

    def __init__(self, source: TensorSource):
        self.source = source
        self.path = source.path
        self.format: Literal["gguf", "safetensors", "orbax"] = source.format
        self.name = model_name(source.path) if source.format == "gguf" else _folder_name(source.path)
        try:
            if isinstance(source, SafetensorsSource):
                self.source = source = dequantised(source)
            family = family_for(source)
            self.config = family.config(source)
            self._rules = fitted(family.rules(source.format, self.config), source.tensors)
            self._ignored = family.ignored(source.format, self.config)
            check_tensors(source, self._rules, self._ignored)
        except WeightsError as error:
            source.close()
            raise error if str(self.path) in str(error) else WeightsError(f"{self.path}: {error}") from error
        self.param_shapes = {rule.param: tuple(rule.shape) for rule in self._rules}
        self.quantization: str | None = None  # what files hold otherwise is dequantised as it is read

    def load_params(
        self, dtype: str, progress: Progress | None = None, quantization: str | None = None
    ) -> dict[str, jax.Array]:
        return load_params(
            self.source, self._rules, self._ignored, dtype, quantization=quantization, progress=progress
        )

    def read_params(
        self, dtype: str, progress: Progress | None = None, quantization: str | None = None
    ) -> Iterator[tuple[str, np.ndarray]]:
        return read_params(
            self.source, self._rules, self._ignored, dtype, quantization=quantization, progress=progress
        )

    def load_tokenizer(self) -> Tokenizer:
        from jaxserve.tokenizer import load

        if self.format == "gguf":
            return load.from_gguf(self.source.metadata)
        return load.from_folder(self.path)

    def chat_templates(self) -> dict[str, str]:
        from jaxserve.tokenizer import template_files

        if self.format == "gguf":
            return template_files.templates_from_gguf(self.source.metadata)
        return template_files.templates_from_folder(self.path)

    def generation_config(self) -> GenerationConfig:
        from jaxserve.tokenizer import generation

        if self.format == "gguf":
            return generation.generation_from_gguf(self.source.metadata, str(self.path))
        return generation.generation_from_folder(self.path)

    def close(self) -> None:
        self.source.close()


class _Converted:
    """A folder made by `jaxserve convert`."""

    def __init__(self, path: Path):
        self.path = path
        self.format: Literal["gguf", "safetensors", "orbax"] = "orbax"
        self.name = _folder_name(path)
        self._manifest = read_manifest(path)
        self.config, self.quantization = self._manifest.config, self._manifest.quantization
        # Names and shapes of parameters are the same whatever the format they came from.
        rules = family_named(self.config.family).rules("safetensors", self.config)
        self.param_shapes = {rule.param: tuple(rule.shape) for rule in rules}
        for param in self.param_shapes.keys() | self._manifest.shapes.keys():
            expected, found = self.param_shapes.get(param), self._manifest.shapes.get(param)
            if expected != found:
                raise WeightsError(
                    f"{path}: parameter {param!r}: expected {_shape(expected)}, found {_shape(found)}: "
                    "convert again"
                )

    def load_params(
        self, dtype: str, progress: Progress | None = None, quantization: str | None = None
    ) -> dict[str, jax.Array]:
        return load_checkpoint_params(
            self.path, dtype, quantization=quantization, manifest=self._manifest, progress=progress
        )

    def read_params(
        self, dtype: str, progress: Progress | None = None, quantization: str | None = None
    ) -> Iterator[tuple[str, np.ndarray]]:
        return read_checkpoint_params(
            self.path, dtype, quantization=quantization, manifest=self._manifest, progress=progress
        )

    def load_tokenizer(self) -> Tokenizer:
        from jaxserve.tokenizer import load

        return load.from_folder(self.path)

    def chat_templates(self) -> dict[str, str]:
        from jaxserve.tokenizer import template_files

        return template_files.templates_from_folder(self.path)

    def generation_config(self) -> GenerationConfig:
        from jaxserve.tokenizer import generation

        return generation.generation_from_folder(self.path)

    def close(self) -> None:
        """Nothing is kept open."""


def _folder_name(path: Path) -> str:
    """`pull` keeps org/name in a folder called org--name."""
    return path.resolve().name.replace("--", "/", 1)


def _shape(shape: tuple[int, ...] | None) -> str:
    return "none" if shape is None else str(list(shape))
