"""Get a tokenizer and a chat template from a model file, and keep them in a checkpoint folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.errors import TokenizerError
from jaxserve.tokenizer.base import Tokenizer
from jaxserve.tokenizer.gguf_metadata import tokenizer_from_gguf
from jaxserve.tokenizer.hf_folder import CONFIG, read_json, tokenizer_from_folder, write_folder
from jaxserve.tokenizer.table import TableTokenizer

_TEMPLATE_FILE = "chat_template.jinja"
_TEMPLATE_KEY = "tokenizer.chat_template"


def from_gguf(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer of a GGUF file, from its key-value pairs as Python values. Raises TokenizerError."""
    return tokenizer_from_gguf(metadata)


def from_folder(path: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder or a converted checkpoint. Raises TokenizerError."""
    return tokenizer_from_folder(path)


def save(tokenizer: Tokenizer, folder: Path) -> None:
    """Write into an existing folder what `from_folder` reads back identically, end ids included."""
    if not isinstance(tokenizer, TableTokenizer):
        raise TokenizerError(f"a {type(tokenizer).__name__} can't be saved: it was not loaded from a model")
    write_folder(tokenizer, folder)


def chat_template_from_gguf(metadata: Mapping[str, Any]) -> str | None:
    """The default chat template's source, or None: a base model. Raises TokenizerError."""
    source = metadata.get(_TEMPLATE_KEY)
    if source is not None and not isinstance(source, str):
        raise TokenizerError(f"{_TEMPLATE_KEY} is a {type(source).__name__}; expected a string")
    return source


def chat_template_from_folder(path: Path) -> str | None:
    """chat_template.jinja, else the configuration's template, or the one named "default" of several."""
    try:
        return (path / _TEMPLATE_FILE).read_text(encoding="utf-8")
    except FileNotFoundError:
        source = read_json(path / CONFIG).get("chat_template")
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"can't read {path / _TEMPLATE_FILE}: {error}") from error
    if isinstance(source, list):
        return _default_of(source, path / CONFIG)
    if source is not None and not isinstance(source, str):
        raise TokenizerError(
            f"{path / CONFIG}: chat_template is a {type(source).__name__}; expected a string"
        )
    return source


def _default_of(named: list[Any], path: Path) -> str:
    try:
        templates = {entry["name"]: entry["template"] for entry in named}
        return templates["default"]
    except (KeyError, TypeError) as error:
        raise TokenizerError(
            f'{path}: chat_template is a list without a template named "default": {error!r}'
        ) from error
