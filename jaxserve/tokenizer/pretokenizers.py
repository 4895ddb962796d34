"""How each kind of byte-level BPE cuts text into words before merging, by the names GGUF gives them.

The patterns are those of the models' own tokenizer.json; llama.cpp has the same list in llama-vocab.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, normalizers, pre_tokenizers

from jaxserve.errors import TokenizerError

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (  # {digits}: how many digits make a word
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """Patterns are applied one after the other, each to the words the last one left."""

    patterns: tuple[str, ...]
    ignore_merges: bool = False  # a word that is a token needs no merges
    add_bos: bool = False  # what a file that doesn't say wants
    nfc: bool = False  # the model's own tokenizer composes characters first

    def build(self) -> Any:
        """The `tokenizers` object: the patterns, then bytes to letters."""
        splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in self.patterns]
        byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return pre_tokenizers.Sequence([*splits, byte_level])

    def normalizer(self) -> Any:
        return normalizers.NFC() if self.nfc else None


_BY_NAME = {
    "smollm": PreTokenizer((r"\p{N}", _GPT2)),
    "gpt-2": PreTokenizer((_GPT2,)),
    "llama-bpe": PreTokenizer((_CL100K.format(digits=r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True),
    "qwen2": PreTokenizer((_CL100K.format(digits=r"\p{N}"),), nfc=True),
    "default": PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
}


def named(name: str) -> PreTokenizer:
    """The pre-tokenizer of this name. Raises TokenizerError for one that isn't known."""
    if name not in _BY_NAME:
        raise TokenizerError(
            f"tokenizer.ggml.pre is {name!r}; supported are {', '.join(sorted(_BY_NAME))}. "
            f"A folder with the model's tokenizer.json works whatever its pre-tokenizer"
        )
    return _BY_NAME[name]
