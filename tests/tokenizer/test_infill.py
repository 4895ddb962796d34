from __future__ import annotations

import pytest

from jaxserve.tokenizer.infill import SPELLINGS, Infill, find_infill
from tests.fakes import FakeTokenizer


def tokenizer_with(*texts: str) -> FakeTokenizer:
    """The fake vocabulary and these as special tokens behind it."""
    tokenizer = FakeTokenizer()
    tokenizer._bytes = (*tokenizer._bytes, *(text.encode() for text in texts))
    tokenizer.vocab_size = len(tokenizer._bytes)
    tokenizer._longest_first = sorted(range(3, tokenizer.vocab_size), key=lambda i: -len(tokenizer._bytes[i]))
    return tokenizer


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_every_spelling_is_found(spelling):
    size = FakeTokenizer().vocab_size
    assert find_infill(tokenizer_with(*spelling)) == Infill(size, size + 1, size + 2)


def test_two_of_the_three_tokens_are_not_enough():
    assert find_infill(FakeTokenizer()) is None
    assert find_infill(tokenizer_with(*SPELLINGS[0][:2])) is None


def test_prefix_and_suffix_stand_before_the_middle_that_is_to_come():
    assert Infill(1, 2, 3).wrap([10, 11], [20]) == [1, 10, 11, 2, 20, 3]


def test_models_without_such_tokens_are_known_for_ones(smollm2, gemma3):
    assert find_infill(smollm2) is None
    assert find_infill(gemma3) is None
