"""Streaming text against decoding all at once."""

from __future__ import annotations

from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import RequestError
from jaxserve.tokenizer.detokenizer import IncrementalDetokenizer

REPLACEMENT = "\ufffd"
VALID_TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=60)


def stream(tokenizer, ids, *, skip_special=True, whole=None) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, skip_special=skip_special, whole=whole)
    return [*(detokenizer.add(i) for i in ids), detokenizer.finish()]


def any_ids(tokenizer):
    """Ids with many byte-like, special and out-of-range ones among them: those are where streams break."""
    partial = [i for i in range(tokenizer.vocab_size) if not is_utf8(tokenizer.token_bytes(i))]
    special = sorted(tokenizer.special_ids)
    assert len(partial) >= 128
    token = (
        st.integers(0, tokenizer.vocab_size - 1)
        | st.sampled_from(partial)
        | st.sampled_from(special)
        | st.integers(-2, tokenizer.vocab_size + 2)
    )
    return st.lists(token, max_size=40)


def is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@pytest.mark.parametrize("skip_special", [True, False])
def test_the_joined_stream_is_the_whole_text_for_any_ids(real, skip_special):
    tokenizer, _ = real
    whole: dict[int, str] = {}  # what one stream has learned, the next ones use, whatever they skip

    @settings(max_examples=400)
    @given(any_ids(tokenizer))
    def check(ids):
        pieces = stream(tokenizer, ids, skip_special=skip_special)
        assert "".join(pieces) == tokenizer.decode(ids, skip_special=skip_special)
        for skips in (skip_special, not skip_special):
            alone = stream(tokenizer, ids, skip_special=skips)
            assert stream(tokenizer, ids, skip_special=skips, whole=whole) == alone

    check()


def test_decoding_is_the_tokens_bytes_read_as_utf8(real):
    tokenizer, _ = real

    @given(any_ids(tokenizer))
    def check(ids):
        data = b"".join(tokenizer.token_bytes(i) for i in ids)
        assert tokenizer.decode(ids, skip_special=False) == data.decode("utf-8", "replace")
        shown = b"".join(tokenizer.token_bytes(i) for i in ids if not tokenizer.is_special(i))
        assert tokenizer.decode(ids) == shown.decode("utf-8", "replace")

    check()


def test_text_comes_back_from_its_ids_and_is_never_streamed_as_half_a_character(real):
    tokenizer, _ = real
    # SmolLM2 has no token for some bytes that only unassigned characters have.
    has_bytes = {data[0] for i in range(tokenizer.vocab_size) if len(data := tokenizer.token_bytes(i)) == 1}
    assert has_bytes.issuperset("aé你👩".encode())
    # SentencePiece's own spelling of a space comes back as one.
    lossy = {REPLACEMENT, "\u2581"} if len(has_bytes) == 256 else {REPLACEMENT}

    @settings(max_examples=300)
    @given(VALID_TEXT)
    def check(text):
        text = "".join(c for c in text if c not in lossy and has_bytes.issuperset(c.encode()))
        ids = tokenizer.encode(text, parse_special=False)
        assert tokenizer.decode(ids) == text
        so_far = ""
        for piece in stream(tokenizer, ids):
            so_far += piece
            assert REPLACEMENT not in piece
            assert text.startswith(so_far)

    check()


def test_a_character_over_several_tokens_appears_with_the_last_of_them(smollm2):
    ids = smollm2.encode("👩")
    assert len(ids) > 1
    assert stream(smollm2, ids) == [*[""] * (len(ids) - 1), "👩", ""]


def test_an_unfinished_character_becomes_one_replacement_at_the_end(smollm2):
    ids = smollm2.encode("👩")[:-1]
    assert stream(smollm2, ids) == [*[""] * len(ids), REPLACEMENT]


def test_streaming_asks_for_a_token_no_more_often_than_it_comes(smollm2):
    class Counting:
        def __init__(self):
            self.asked = []

        def is_special(self, token_id):
            return smollm2.is_special(token_id)

        def token_bytes(self, token_id):
            self.asked.append(token_id)
            return smollm2.token_bytes(token_id)

    ids = smollm2.encode("A sentence with 👩‍💻 in it. " * 20)
    counting = Counting()
    stream(counting, ids)
    assert set(counting.asked) == set(ids)
    assert not Counter(counting.asked) - Counter(ids)
    whole = [i for i in set(ids) if is_utf8(smollm2.token_bytes(i))]
    assert {counting.asked.count(i) for i in whole} == {1}  # whole characters are remembered


def test_a_lone_surrogate_is_a_client_error_that_names_it(real):
    tokenizer, _ = real
    for parse_special in (True, False):
        with pytest.raises(RequestError, match=r"U\+D800 at character 2"):
            tokenizer.encode("ab\ud800", parse_special=parse_special)


def test_zero_bytes_in_a_text_are_kept(real):
    tokenizer, _ = real
    assert tokenizer.decode(tokenizer.encode("a\0b")) == "a\0b"


def test_threads_encode_and_decode_at_the_same_time(real):
    tokenizer, _ = real
    texts = [f"Thread {n}: naïve 你好 <|im_end|> <end_of_turn> {'x' * n}" for n in range(40)]
    expected = [(tokenizer.encode(t), tokenizer.encode(t, parse_special=False)) for t in texts]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            found = pool.map(lambda t: (tokenizer.encode(t), tokenizer.encode(t, parse_special=False)), texts)
            assert list(found) == expected
        assert list(pool.map(lambda ids: tokenizer.decode(ids[1]), expected)) == texts
