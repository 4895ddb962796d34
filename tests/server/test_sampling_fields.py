"""Penalties, biases, bad words, allowed ids and min_tokens: what reaches the engine, what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.errors import RequestError
from jaxserve.server.openai import parse_chat, parse_completion
from jaxserve.types import MAX_BAD_WORD_TOKENS, MAX_LOGIT_BIAS, SamplingParams
from tests.fakes import FakeTokenizer
from tests.server.running import served_model

SERVED = served_model()
V = SERVED.vocab_size
TOKENIZER = FakeTokenizer()


def completion(**fields: Any) -> SamplingParams:
    return parse_completion({"prompt": "hello", **fields}, SERVED, 0.0).requests[0].params


def chat(**fields: Any) -> SamplingParams:
    messages = [{"role": "user", "content": "hello"}]
    return parse_chat({"messages": messages, **fields}, SERVED, 0.0).requests[0].params


@pytest.mark.parametrize("params", [completion, chat])
@pytest.mark.parametrize(
    ("sent", "field", "value"),
    [
        ({"repetition_penalty": 1.3}, "repetition_penalty", 1.3),
        ({"repetition_penalty": 2}, "repetition_penalty", 2.0),
        ({"presence_penalty": -2}, "presence_penalty", -2.0),
        ({"frequency_penalty": 0.25}, "frequency_penalty", 0.25),
        ({"logit_bias": {"7": -100, "5": 1.5, "0": 100}}, "logit_bias", ((0, 100.0), (5, 1.5), (7, -100.0))),
        ({"logit_bias": {}}, "logit_bias", ()),
        ({"allowed_token_ids": [5, 7, 5]}, "allowed_token_ids", frozenset((5, 7))),
        ({"allowed_token_ids": list(range(V))}, "allowed_token_ids", frozenset(range(V))),
        ({"min_tokens": 12}, "min_tokens", 12),
        ({"bad_words": []}, "bad_words", ()),
    ],
)
def test_a_field_reaches_the_engine(params, sent, field, value):
    assert getattr(params(**sent), field) == value
    assert params(**sent).is_shaped == bool(value)


@pytest.mark.parametrize("params", [completion, chat])
def test_nothing_is_shaped_unless_asked(params):
    assert not params(temperature=0.5, top_k=3, seed=1, stop=["x"], ignore_eos=True).is_shaped
    assert not params(presence_penalty=0, repetition_penalty=1, min_tokens=0, logit_bias=None).is_shaped


def test_a_bad_word_is_banned_as_a_beginning_and_after_a_space():
    encode = TOKENIZER.encode
    assert completion(bad_words=["the", " the"]).bad_words == (tuple(encode("the")), tuple(encode(" the")))
    assert completion(bad_words=["xyz"]).bad_words == (tuple(encode("xyz")), tuple(encode(" xyz")))
    assert completion(bad_words=["\n\n"]).bad_words[0] == tuple(encode("\n\n"))
    assert completion(bad_words=[" "]).bad_words == (tuple(encode(" ")),)
    assert completion(bad_words=["<eos>"]).bad_words[0] == tuple(encode("<eos>", parse_special=False))


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"repetition_penalty": 0}, "repetition_penalty", "at least 0.01, got 0"),
    ({"repetition_penalty": 101}, "repetition_penalty", "at most 100, got 101"),
    ({"repetition_penalty": "1"}, "repetition_penalty", "a number"),
    ({"presence_penalty": 2.5}, "presence_penalty", "at most 2, got 2.5"),
    ({"presence_penalty": -2.5}, "presence_penalty", "at least -2"),
    ({"frequency_penalty": 3}, "frequency_penalty", "at most 2, got 3"),
    ({"frequency_penalty": float("nan")}, "frequency_penalty", "number"),
    ({"min_tokens": -1}, "min_tokens", "at least 0, got -1"),
    ({"min_tokens": 2.5}, "min_tokens", "an integer"),
    ({"min_tokens": 9, "max_tokens": 8}, "min_tokens", "lower 'min_tokens' to 8 or less, or raise"),
    ({"logit_bias": []}, "logit_bias", 'like {"50256": -100}, got []'),
    ({"logit_bias": {"x": 1}}, "logit_bias", 'the key "x", which is no token id: write it in digits'),
    ({"logit_bias": {"-1": 1}}, "logit_bias", 'the key "-1"'),
    ({"logit_bias": {"01": 1}}, "logit_bias", 'the key "01"'),
    ({"logit_bias": {"9" * 5000: 1}}, "logit_bias", "no token id"),
    ({"logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100, token id 5 has 101"),
    ({"logit_bias": {"5": True}}, "logit_bias", "token id 5 has true"),
    ({"logit_bias": {"5": None}}, "logit_bias", "token id 5 has null"),
    ({"logit_bias": {"5": float("nan")}}, "logit_bias", "token id 5 has NaN"),
    ({"logit_bias": {str(V): 1}}, "logit_bias", f"token id {V}, outside of the vocabulary [0, {V})"),
    ({"logit_bias": dict.fromkeys(map(str, range(1025)), 1)}, "logit_bias", f"at most {MAX_LOGIT_BIAS}"),
    ({"allowed_token_ids": []}, "allowed_token_ids", "at least one token id"),
    ({"allowed_token_ids": 5}, "allowed_token_ids", "a list of token ids"),
    ({"allowed_token_ids": [5, "6"]}, "allowed_token_ids", 'the one at 1 is "6"'),
    ({"allowed_token_ids": [5, -1]}, "allowed_token_ids", "the one at 1 is -1"),
    ({"allowed_token_ids": [5, V]}, "allowed_token_ids[1]", "outside of the vocabulary"),
    ({"bad_words": "x"}, "bad_words", "a list of up to 128 strings"),
    ({"bad_words": ["a", 5]}, "bad_words", "a list of up to 128 strings"),
    ({"bad_words": [""]}, "bad_words", "an empty string"),
    ({"bad_words": ["a"] * 129}, "bad_words", "129 strings, at most 128"),
    ({"bad_words": ["a" * 1025]}, "bad_words", "longer than 1024 characters"),
    ({"bad_words": ["a", "x" * 40]}, "bad_words[1]", f"40 tokens; at most {MAX_BAD_WORD_TOKENS} "),
]  # fmt: skip


@pytest.mark.parametrize("params", [completion, chat])
@pytest.mark.parametrize(("sent", "param", "text"), WRONG)
def test_a_wrong_value_is_an_error_that_names_field_value_limit_and_remedy(params, sent, param, text):
    with pytest.raises(RequestError) as caught:
        params(**sent)
    assert (caught.value.param, caught.value.status) == (param, 400)
    assert text in caught.value.message
    assert len(caught.value.message) < 600


def test_min_tokens_must_fit_what_is_generated_by_default():
    assert completion(min_tokens=16).min_tokens == 16
    with pytest.raises(RequestError, match=r"'min_tokens' is 17, .* leave 16 tokens"):
        completion(min_tokens=17)
