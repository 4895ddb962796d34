"""The tokens by which a model is told to fill in the middle of a text."""

from __future__ import annotations

from dataclasses import dataclass

from jaxserve.tokenizer.base import Tokenizer

# (prefix, suffix, middle) as families spell them: Qwen coder and CodeGemma, StarCoder and Granite,
# SantaCoder, DeepSeek coder. All take the order prefix, suffix, middle.
# Source: Bavarian et al. 2022, arXiv:2207.14255.
SPELLINGS = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
)


@dataclass(frozen=True, slots=True)
class Infill:
    """Ids of the three tokens."""

    prefix_id: int
    suffix_id: int
    middle_id: int

    def wrap(self, prefix: list[int], suffix: list[int]) -> list[int]:
        """The prompt whose continuation is what belongs between the two."""
        return [self.prefix_id, *prefix, self.suffix_id, *suffix, self.middle_id]


def find_infill(tokenizer: Tokenizer) -> Infill | None:
    """The tokens of this vocabulary, or None: the model was not trained to fill in."""
    for texts in SPELLINGS:
        ids = [tokenizer.encode(text, parse_special=True) for text in texts]
        if all(len(found) == 1 for found in ids):
            return Infill(*(found[0] for found in ids))
    return None
