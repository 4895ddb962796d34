"""Finding special tokens, against trying every token at every place."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.tokenizer.special import SpecialSplitter


def split_slowly(tokens: dict[str, int], text: str) -> list[str | int]:
    pieces: list[str | int] = []
    plain = ""
    position = 0
    while position < len(text):
        here = [t for t in tokens if text.startswith(t, position)]
        if here:
            longest = max(here, key=len)
            pieces += [plain] if plain else []
            pieces.append(tokens[longest])
            plain = ""
            position += len(longest)
        else:
            plain += text[position]
            position += 1
    return [*pieces, plain] if plain else pieces


small = st.text("ab<^-]\\", min_size=1, max_size=4)


@given(st.lists(small, unique=True, max_size=6), st.text("ab<^-]\\c", max_size=30))
def test_the_split_is_the_leftmost_longest_one(tokens, text):
    ids = {token: i for i, token in enumerate(tokens)}
    assert list(SpecialSplitter(ids).split(text)) == split_slowly(ids, text)


def test_a_vocabulary_without_special_tokens_leaves_text_whole():
    assert list(SpecialSplitter({}).split("a<b")) == ["a<b"]
    assert list(SpecialSplitter({}).split("")) == []


def test_id_zero_is_found_like_any_other():
    assert list(SpecialSplitter({"<pad>": 0, "<": 5}).split("x<pad><")) == ["x", 0, 5]
