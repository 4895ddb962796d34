"""A tokenizer from the key-value pairs of a GGUF file."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxserve.errors import TokenizerError
from jaxserve.tokenizer import pretokenizers
from jaxserve.tokenizer.boundaries import make_boundaries
from jaxserve.tokenizer.bpe import BpeTokenizer, byte_level_tokenizer
from jaxserve.tokenizer.sentencepiece import CONTROL, NORMAL, SentencePieceTokenizer, model_from_pieces
from jaxserve.tokenizer.table import Boundaries, TableTokenizer

_PREFIX = "tokenizer.ggml."
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def tokenizer_from_gguf(metadata: Mapping[str, Any]) -> TableTokenizer:
    """Raises TokenizerError that names the key that is missing, of a wrong type or not supported."""
    kind = _get(metadata, "model", str)
    if kind not in ("gpt2", "llama"):
        raise TokenizerError(
            f'{_PREFIX}model is {kind!r}; supported are "gpt2" (byte-level BPE) and "llama" (SentencePiece)'
        )
    if _get(metadata, "add_eos_token", bool, False):
        raise TokenizerError(
            f"{_PREFIX}add_eos_token is true: a prompt that ends with EOS can't be continued"
        )
    tokens = _list(metadata, "tokens", str)
    types = _list(metadata, "token_type", int, len(tokens), default=NORMAL)
    end_ids = [i for key in _END_KEYS if (i := _id(metadata, key, len(tokens))) is not None]
    bos_id = _id(metadata, "bos_token_id", len(tokens))
    for token_id in [*end_ids, *([] if bos_id is None else [bos_id])]:
        if types[token_id] == NORMAL:  # some converters forget to mark them
            types[token_id] = CONTROL

    def boundaries_with(add_bos: bool) -> Callable[[Mapping[str, int], frozenset[int]], Boundaries]:
        return lambda ids_by_text, special: make_boundaries(
            ids_by_text,
            special,
            vocab_size=len(tokens),
            bos_id=bos_id,
            eos_ids=end_ids,
            add_bos=_get(metadata, "add_bos_token", bool, add_bos),
        )

    if kind == "gpt2":
        if _get(metadata, "add_space_prefix", bool, False):
            raise TokenizerError(f"{_PREFIX}add_space_prefix is true, which byte-level BPE has no rule for")
        pre = pretokenizers.named(_get(metadata, "pre", str, "default"))
        merges = _list(metadata, "merges", str)
        bpe = byte_level_tokenizer(tokens, merges, types, pre)
        return BpeTokenizer(bpe, boundaries_with(pre.add_bos and bos_id is not None))
    model = model_from_pieces(
        tokens,
        _list(metadata, "scores", float, len(tokens)),
        types,
        unknown_id=_id(metadata, "unknown_token_id", len(tokens)),
        add_dummy_prefix=_get(metadata, "add_space_prefix", bool, True),
    )
    return SentencePieceTokenizer(model, boundaries_with(bos_id is not None))


_REQUIRED: Any = object()


def _get(metadata: Mapping[str, Any], key: str, kind: type, default: Any = _REQUIRED) -> Any:
    value = metadata.get(_PREFIX + key, default)
    if value is _REQUIRED:
        raise TokenizerError(f"the GGUF file has no {_PREFIX}{key}: it holds no usable tokenizer")
    if value is not default and not isinstance(value, kind):
        raise TokenizerError(f"{_PREFIX}{key} is {value!r:.80}; expected {kind.__name__}")
    return value


def _id(metadata: Mapping[str, Any], key: str, vocab_size: int) -> int | None:
    value = _get(metadata, key, int, None)
    if value is not None and not 0 <= value < vocab_size:
        raise TokenizerError(f"{_PREFIX}{key} is {value}, outside the vocabulary of {vocab_size} tokens")
    return value


def _list(
    metadata: Mapping[str, Any], key: str, kind: type, length: int | None = None, default: Any = _REQUIRED
) -> list[Any]:
    """A list of `kind`, of this length. With a `default`, a missing list is that many of it."""
    if default is not _REQUIRED and _PREFIX + key not in metadata:
        return [default] * (length or 0)
    values = list(_get(metadata, key, list))
    if length is not None and len(values) != length:
        raise TokenizerError(f"{_PREFIX}{key} has {len(values)} entries for {length} tokens")
    if not values and length is None:
        raise TokenizerError(f"{_PREFIX}{key} is empty")
    for i, value in enumerate(values):
        if not isinstance(value, kind):
            raise TokenizerError(f"{_PREFIX}{key}[{i}] is {value!r:.80}; expected {kind.__name__}")
    return values
