"""How each kind of byte-level BPE cuts text into words before merging, by the names GGUF gives them.

The patterns are those of the models' own tokenizer.json; llama.cpp has the same list in llama-vocab.cpp, and
o200k's is in tiktoken's openai_public.py.
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
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = (  # capitals end a word; %(ends)s: what belongs to the word before it
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+%(ends)s|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*%(ends)s|%(digits)s"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
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


_DIGITS_GPT2 = PreTokenizer((r"\p{N}", _GPT2))
_PLAIN_GPT2 = PreTokenizer((_GPT2,))
_LLAMA3 = PreTokenizer((_CL100K.format(digits=r"\p{N}{1,3}"),), ignore_merges=True, add_bos=True)
_TRIPLES = PreTokenizer(_LLAMA3.patterns)
_BY_NAME = {
    "smollm": _DIGITS_GPT2,
    "refact": _DIGITS_GPT2,  # granite 3 and granite code
    "starcoder": _DIGITS_GPT2,
    "gpt-2": _PLAIN_GPT2,
    "phi-2": _PLAIN_GPT2,
    "olmo": _PLAIN_GPT2,
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "smaug-bpe": _TRIPLES,  # llama 3 without a BOS of its own
    "dbrx": _TRIPLES,  # olmo2, phi-4
    "gpt-4o": PreTokenizer(  # phi-4-mini, gpt-oss
        (_CASED % {"ends": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?", "digits": r"\p{N}{1,3}"},)
    ),
    "tekken": PreTokenizer(  # mistral-nemo and later
        (_CASED % {"ends": "", "digits": r"\p{N}"},), ignore_merges=True, add_bos=True
    ),
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
