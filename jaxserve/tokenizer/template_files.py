"""The chat templates that come with a model, by name. The one called "default" is the model's main one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.errors import TokenizerError
from jaxserve.tokenizer.hf_folder import CONFIG, read_json

DEFAULT, TOOL_USE = "default", "tool_use"

_FILE, _FOLDER = "chat_template.jinja", "additional_chat_templates"
_OLD_FILE = "chat_template.json"  # of models with a processor
_GGUF_KEY, _GGUF_NAMES = "tokenizer.chat_template", "tokenizer.chat_templates"
_NAME = re.compile(r"\w[\w.-]{0,99}")  # is also a file's name, and no way up or out


def templates_from_gguf(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The sources of a GGUF file's templates; empty for a base model. Raises TokenizerError."""
    found = {
        key.removeprefix(_GGUF_KEY).removeprefix(".") or DEFAULT: _source(value, key)
        for key, value in metadata.items()
        if key == _GGUF_KEY or key.startswith(f"{_GGUF_KEY}.")
    }
    names = metadata.get(_GGUF_NAMES) or []
    for name in names if isinstance(names, list) else [names]:
        if name not in found:
            raise TokenizerError(f"{_GGUF_NAMES} lists {name!r}, but there is no {_GGUF_KEY}.{name}")
    return _checked(found, _GGUF_KEY)


def templates_from_folder(path: Path) -> dict[str, str]:
    """The sources of the templates of a Hugging Face folder or a converted one; empty for a base model.

    Files of their own come first, then tokenizer_config.json, then chat_template.json. Where one of these
    has a default template, what comes after it is not looked at. Raises TokenizerError.
    """
    files = [*([path / _FILE] if (path / _FILE).exists() else []), *(path / _FOLDER).glob("*.jinja")]
    found = _checked({DEFAULT if file.name == _FILE else file.stem: _text(file) for file in files}, path)
    for name in (CONFIG, _OLD_FILE):
        if DEFAULT not in found:
            where = f"{path / name}: chat_template"
            found = _checked(_named(read_json(path / name).get("chat_template"), where), where) | found
    return found


def write_templates(templates: Mapping[str, str], path: Path) -> None:
    """Write into an existing folder what `templates_from_folder` reads back."""
    for name, source in templates.items():
        file = path / _FILE if name == DEFAULT else path / _FOLDER / f"{name}.jinja"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(source.encode())  # as they are, line ends included


def _named(value: Any, where: str) -> dict[str, str]:
    """One source, or a list of {name, template}, or an object of sources by name."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {DEFAULT: _source(value, where)}
    if isinstance(value, dict):
        return {name: _source(source, f"{where}.{name}") for name, source in value.items()}
    if not isinstance(value, list):
        raise TokenizerError(f"{where} is a {type(value).__name__}; expected a string or a list of templates")
    found = {}
    for i, entry in enumerate(value):
        if not (isinstance(entry, dict) and isinstance(entry.get("name"), str)):
            raise TokenizerError(f"{where}[{i}] is {entry!r:.80}; expected an object of name and template")
        found[entry["name"]] = _source(entry.get("template"), f"{where}[{i}].template")
    return found


def _source(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise TokenizerError(f"{where} is a {type(value).__name__}; expected a string")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise TokenizerError(f"{where} is no valid Unicode: {error}") from error
    return value


def _text(file: Path) -> str:
    try:
        return file.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"can't read {file}: {error}") from error


def _checked(templates: dict[str, str], where: object) -> dict[str, str]:
    for name in templates:
        if not _NAME.fullmatch(name):
            raise TokenizerError(
                f"{where}: a template is called {name!r:.80}; expected letters, digits, '_', '-' and '.'"
            )
    return templates
