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
# Of deepseek before v3: letters that have a case, as its authors list them, and ideographs up to Hangul.
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-\u0556"
    "\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_MARKS = "!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002"
_DEEPSEEK_IDEOGRAPHS = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
_DEEPSEEK_V3 = (
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
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
    "deepseek-llm": PreTokenizer(  # deepseek v2 too
        (
            "[\r\n]",
            rf"\s?[{_DEEPSEEK_LETTERS}]+",
            rf"\s?[{_DEEPSEEK_MARKS}]+",
            r"\s+$",
            _DEEPSEEK_IDEOGRAPHS,
            r"\p{N}",
        )
    ),
    "deepseek-coder": PreTokenizer(("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_IDEOGRAPHS, r"\p{N}")),
    "deepseek-v3": PreTokenizer(  # and r1
        (r"\p{N}{1,3}", "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+", _DEEPSEEK_V3)
    ),
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
