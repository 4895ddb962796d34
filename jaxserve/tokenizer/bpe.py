"""BPE over the `tokenizers` package: byte-level, or on characters with byte fallback."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models

from jaxserve.errors import TokenizerError
from jaxserve.tokenizer.pretokenizers import PreTokenizer
from jaxserve.tokenizer.table import Boundaries, TableTokenizer

_CONTROL, _USER_DEFINED = 3, 4  # GGUF token types
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class BpeTokenizer(TableTokenizer):
    """A `tokenizers.Tokenizer` whose decoder is one we can state as bytes per token.

    Added tokens marked special are special. BOS is ours to add: the post-processor is not run. A byte
    that the vocabulary has no token for is dropped from the text, as the model's own tokenizer does.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        boundaries_of: Callable[[Mapping[str, int], frozenset[int]], Boundaries],
    ):
        _check(tokenizer)
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        added = tokenizer.get_added_tokens_decoder()
        ids_by_text = tokenizer.get_vocab(with_added_tokens=True)
        texts = [""] * (1 + max(ids_by_text.values(), default=-1))  # an id nobody uses stays empty
        for text, token_id in ids_by_text.items():
            texts[token_id] = text
        to_bytes = _byte_rule(tokenizer)
        raw = [text.encode() if i in added else to_bytes(text) for i, text in enumerate(texts)]
        special = frozenset(i for i, token in added.items() if token.special)
        super().__init__(texts, raw, special, boundaries_of(ids_by_text, special))

    def _encode(self, text: str, parse_special: bool) -> list[int]:
        tokenizer = self._tokenizer if parse_special else self._unparsed
        # A batch of one: unlike `encode`, it leaves other threads running, and it tracks no offsets.
        return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0].ids

    @cached_property
    def _unparsed(self) -> Tokenizer:
        """The same, with the text of special tokens read as ordinary text. Made when first needed."""
        copy = Tokenizer.from_str(self._tokenizer.to_str())
        copy.encode_special_tokens = True
        return copy

    def write(self, folder: Path) -> Mapping[str, Any]:
        (folder / "tokenizer.json").write_text(self._tokenizer.to_str(), encoding="utf-8")
        return {"tokenizer_class": "PreTrainedTokenizerFast"}


def byte_level_tokenizer(
    tokens: Sequence[str], merges: Sequence[str], types: Sequence[int], pre: PreTokenizer
) -> Tokenizer:
    """Byte-level BPE of these tokens (id = index) and merges ("left right"). Raises TokenizerError."""
    vocab = {text: i for i, text in enumerate(tokens)}
    if len(vocab) < len(tokens):
        twice = next(i for i, text in enumerate(tokens) if vocab[text] != i)
        raise TokenizerError(f"token {tokens[twice]!r} stands twice: ids {twice} and {vocab[tokens[twice]]}")
    pairs = []
    for rank, merge in enumerate(merges):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise TokenizerError(f"merge {rank} is {merge!r}: expected two tokens with a space between")
        pairs.append((left, right))
    try:
        tokenizer = Tokenizer(models.BPE(vocab, pairs, ignore_merges=pre.ignore_merges))
    except Exception as error:  # the package raises nothing narrower
        raise TokenizerError(f"the BPE vocabulary is broken: {error}") from error
    if (normalizer := pre.normalizer()) is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre.build()
    tokenizer.decoder = decoders.ByteLevel()
    for kind, add in ((_CONTROL, tokenizer.add_special_tokens), (_USER_DEFINED, tokenizer.add_tokens)):
        add([AddedToken(t, normalized=False) for t, its_kind in zip(tokens, types) if its_kind == kind])
    return tokenizer


def read_tokenizer_json(path: Path) -> Tokenizer:
    """Raises TokenizerError for a file that is missing, broken or no tokenizer."""
    try:
        return Tokenizer.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise TokenizerError(f"can't read {path}: {error.strerror}") from error
    except Exception as error:  # UnicodeDecodeError, and the package's bare Exception
        raise TokenizerError(f"{path} is no valid tokenizer.json: {error}") from error


def adds_itself(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """Ids that its post-processor puts before and after a text, BOS and EOS as a rule."""
    plain = tokenizer.encode("a", add_special_tokens=False).ids
    full = tokenizer.encode("a").ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start], full[start + len(plain) :]
    raise TokenizerError("tokenizer.json: its post-processor changes the ids of the text itself")


def _check(tokenizer: Tokenizer) -> None:
    """Refuse, by name, whatever would make our bytes per token differ from the package's decoder."""
    model = tokenizer.model
    if not isinstance(model, models.BPE):
        raise TokenizerError(f"tokenizer.json holds a {type(model).__name__} model; only BPE is supported")
    if model.dropout:
        raise TokenizerError(f"tokenizer.json: BPE dropout {model.dropout} makes ids random; set it to null")
    for option in ("continuing_subword_prefix", "end_of_word_suffix"):
        if getattr(model, option):
            raise TokenizerError(f"tokenizer.json: BPE {option} {getattr(model, option)!r} is not supported")


def _byte_rule(tokenizer: Tokenizer) -> Callable[[str], bytes]:
    """How a token of the model becomes bytes, read from the decoder."""
    if tokenizer.decoder is None:
        raise TokenizerError("tokenizer.json has no decoder, so the text of its tokens is unknown")
    decoder = json.loads(tokenizer.decoder.__getstate__())
    steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    space, fallback = None, False
    for step in steps:
        match step:
            case {"type": "ByteLevel"} if len(steps) == 1:
                return _byte_level_bytes
            case {"type": "Replace", "pattern": {"String": str(mark)}, "content": " "} if space is None:
                space = mark
            case {"type": "Metaspace", "replacement": str(mark)} if space is None:
                space = mark
            case {"type": "ByteFallback"}:
                fallback = True
            case {"type": "Fuse"}:
                pass
            case {"type": "Strip", "content": " ", "stop": 0}:
                pass  # the space before a whole text; ours is kept, see TableTokenizer
            case _:
                raise TokenizerError(f"tokenizer.json: decoder step {json.dumps(step)} is not supported")

    def to_bytes(text: str) -> bytes:
        if fallback and (byte := _BYTE_TOKEN.fullmatch(text)):
            return bytes([int(byte[1], 16)])
        return (text.replace(space, " ") if space else text).encode()

    return to_bytes


def _letters_of_bytes() -> dict[int, int]:
    """GPT-2's spelling of bytes as printable letters, inverted: letter -> byte, as code points."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in printable]
    return {byte: byte for byte in printable} | {0x100 + n: byte for n, byte in enumerate(rest)}


_BYTE_OF_LETTER = _letters_of_bytes()
_LETTERS = frozenset(map(chr, _BYTE_OF_LETTER))


def _byte_level_bytes(text: str) -> bytes:
    if _LETTERS.issuperset(text):
        return text.translate(_BYTE_OF_LETTER).encode("latin-1")
    return text.encode()  # not spelled in letters: stands for itself, as in the package's decoder
