from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxserve.engine.output import OutputProcessor, StopMatcher
from jaxserve.types import SamplingParams
from tests.engine.oracle import answer
from tests.fakes import EOS, TURN, FakeTokenizer

TOKENIZER = FakeTokenizer()
LETTERS = [3 + byte for byte in b"ab"]
PIECES = list(range(259, TOKENIZER.vocab_size))
HALVES = [3 + byte for byte in "é🙂".encode()]


def run(ids, params):
    """Feed ids until the end; return the pieces of text, the ids used, and finish and stop reason."""
    processor = OutputProcessor(params, TOKENIZER, TOKENIZER.eos_ids)
    pieces = []
    for n, token_id in enumerate(ids, 1):
        text, *ending = processor.add(token_id)
        pieces.append(text)
        if ending != [None, None]:
            return pieces, tuple(ids[:n]), tuple(ending)
    raise AssertionError("the request did not end at max_tokens")


@given(
    ids=st.lists(st.sampled_from([*LETTERS * 3, *PIECES, *HALVES, TURN, EOS]), min_size=1, max_size=24),
    stop=st.lists(
        st.one_of(st.text("ab", min_size=1, max_size=5), st.text("abé🙂�the ", min_size=1, max_size=3)),
        max_size=4,
        unique=True,
    ),
    stop_token_ids=st.frozensets(st.sampled_from([TURN, EOS, *LETTERS, *PIECES]), max_size=2),
    ignore_eos=st.booleans(),
    include=st.booleans(),
    skip_special=st.booleans(),
)
@example(  # half a character before the end turns into the stop string's last one
    ids=[LETTERS[0], HALVES[0], EOS],
    stop=["a�"],
    stop_token_ids=frozenset(),
    ignore_eos=False,
    include=False,
    skip_special=True,
)
def test_the_joined_stream_is_the_whole_text_cut_at_its_first_end(
    ids, stop, stop_token_ids, ignore_eos, include, skip_special
):
    params = SamplingParams(
        max_tokens=len(ids),
        stop=tuple(stop),
        stop_token_ids=stop_token_ids,
        ignore_eos=ignore_eos,
        include_stop_str_in_output=include,
        skip_special_tokens=skip_special,
    )
    pieces, used, ending = run(ids, params)
    expected = answer(ids, params, TOKENIZER)
    assert "".join(pieces) == expected.text
    assert (used, *ending) == (
        expected.token_ids,
        expected.finish_reason,
        expected.stop_reason,
    )


# Stop strings that overlap with themselves and end in each other.
STOPS = st.lists(
    st.sampled_from(["aab", "aac", "ababc", "aabaab", "bba", "abba", "bb", "babb"]),
    min_size=1,
    max_size=3,
    unique=True,
)


@given(
    text=st.text("aabbc", max_size=30), stops=STOPS, cuts=st.lists(st.integers(0, 30)), include=st.booleans()
)
@example(text="aaab", stops=["aab"], cuts=[], include=False)
@example(text="aabac", stops=["aac"], cuts=[], include=False)
@example(text="abababc", stops=["ababc"], cuts=[3], include=True)
@example(text="ababb", stops=["bb", "babb"], cuts=[3], include=False)
@example(text="ababb", stops=["babb", "bb"], cuts=[3], include=False)
def test_only_the_longest_suffix_that_may_become_a_stop_string_is_held_back(text, stops, cuts, include):
    matcher = StopMatcher(tuple(stops), include_in_output=include)
    shown, borders = "", sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    ends = [end for end in range(len(text) + 1) if text[:end].endswith(tuple(stops))]
    for begin, end in pairwise(borders):
        safe, stop = matcher.push(text[begin:end])
        shown += safe
        if ends and ends[0] <= end:
            assert stop == max((s for s in stops if text[: ends[0]].endswith(s)), key=len)
            assert shown == text[: ends[0] if include else ends[0] - len(stop)]
            return
        assert stop is None
        held = max(n for n in range(end + 1) if any(s.startswith(text[end - n : end]) for s in stops))
        assert shown == text[: end - held]
    assert shown + matcher.flush() == text


def test_a_stop_string_is_never_partly_streamed():
    ids = TOKENIZER.encode("so I stand stock-still, STO stopwatch")
    params = SamplingParams(max_tokens=len(ids), stop=("stopw",))
    pieces, _, ending = run(ids, params)
    assert "".join(pieces) == "so I stand stock-still, STO "
    assert ending == ("stop", "stopw")


@pytest.mark.parametrize("end", [EOS, TURN])
def test_the_text_of_a_stop_token_is_not_shown_even_when_special_tokens_are(end):
    params = SamplingParams(max_tokens=9, stop_token_ids=frozenset({TURN}), skip_special_tokens=False)
    pieces, used, ending = run([*LETTERS, end], params)
    assert "".join(pieces) == "ab"
    assert used == (*LETTERS, end)
    assert ending == ("stop", None if end == EOS else TURN)


def test_an_ignored_eos_can_still_be_a_stop_token():
    params = SamplingParams(max_tokens=3, ignore_eos=True, stop_token_ids=frozenset({EOS}))
    _, used, ending = run([LETTERS[0], EOS, LETTERS[0]], params)
    assert (len(used), *ending) == (2, "stop", EOS)


def test_text_held_back_for_a_stop_string_is_given_when_the_request_is_cut_off():
    processor = OutputProcessor(SamplingParams(max_tokens=9, stop=("abc",)), TOKENIZER, TOKENIZER.eos_ids)
    assert [processor.add(token_id)[0] for token_id in LETTERS] == ["", ""]
    assert processor.flush() == "ab"


@pytest.mark.parametrize(
    ("min_tokens", "text", "reason"),
    [
        (0, "", "stop"), (3, "", "stop"), (4, "stopab", "stop"), (9, "stopab", "stop"),
        (10, "stopabstop", None),
    ],
)  # fmt: skip
def test_a_stop_string_that_is_complete_before_min_tokens_is_text(min_tokens, text, reason):
    params = SamplingParams(30, stop=("stop",), min_tokens=min_tokens)
    output = OutputProcessor(params, FakeTokenizer(), frozenset())
    shown, ended = "", None
    for byte in b"stopabstop":
        piece, ended, _ = output.add(3 + byte)
        shown += piece
        if ended is not None:
            break
    assert (shown, ended) == (text, reason)


def test_a_stop_string_may_begin_before_min_tokens_are_out_and_end_after():
    output = OutputProcessor(SamplingParams(30, stop=("abc",), min_tokens=2), FakeTokenizer(), frozenset())
    pieces = [output.add(3 + byte) for byte in b"abc"]
    assert "".join(piece for piece, _, _ in pieces) == ""
    assert pieces[-1][1:] == ("stop", "abc")
