"""Get a tokenizer from a model file, and keep it in a checkpoint folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.errors import TokenizerError
from jaxserve.tokenizer.base import Tokenizer
from jaxserve.tokenizer.gguf_metadata import tokenizer_from_gguf
from jaxserve.tokenizer.hf_folder import tokenizer_from_folder, write_folder
from jaxserve.tokenizer.table import TableTokenizer


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
