"""Bodies that are no JSON, no object, or hold anything at all."""

from __future__ import annotations

import json

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxserve.errors import RequestError
from jaxserve.server.openai import loads, parse_chat, parse_completion
from jaxserve.server.schema import REFUSED_CHAT, REFUSED_COMPLETION, ChatBody, CompletionBody
from tests.server.running import served_model

SERVED = served_model()
MESSAGES = [{"role": "user", "content": "hello"}]
N = SERVED.max_model_len


@pytest.mark.parametrize("body", [None, [], "s", 5, True])
def test_a_body_that_is_no_object_is_an_error(body):
    for parse in (parse_completion, parse_chat):
        with pytest.raises(RequestError, match="must be a JSON object"):
            parse(body, SERVED, 0.0)


@pytest.mark.parametrize(
    "raw",
    [
        b"", b"{x", b'{"a": NaN}', b'{"a": Infinity}', b'{"a": -Infinity}', b"{'a': 1}", b'{"a": 1,}',
        b'"\xff"', b"\xff\xfe", b'{"a": "\\ud800"}', b'["\\uDFFF"]', b"[" * 100_000, b'{"a":' * 100_000,
        b"1" * 5000, b'{"a": 1} x',
    ],
)  # fmt: skip
def test_what_is_no_json_is_an_error(raw):
    with pytest.raises(RequestError) as caught:
        loads(raw)
    assert caught.value.status == 400
    assert caught.value.code == "invalid_json"
    assert len(caught.value.message) < 300


def test_pairs_of_surrogates_are_characters():
    assert loads(b'{"a": "\\ud83d\\ude42"}') == {"a": "🙂"}
    assert loads('{"a": "🙂"}'.encode()) == {"a": "🙂"}


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
names = st.sampled_from(
    sorted({*CompletionBody.model_fields, *ChatBody.model_fields, *REFUSED_CHAT, *REFUSED_COMPLETION})
)


@given(st.dictionaries(names, anything, max_size=4), st.booleans())
@example({"stream_options": {"include_usage": {}}, "stream": True}, True)
def test_whatever_the_fields_hold_parsing_gives_a_request_or_a_client_error(fields, valid_otherwise):
    base = {"prompt": "hello", "messages": MESSAGES} if valid_otherwise else {}
    statuses = set()
    for parse in (parse_completion, parse_chat):
        try:
            generation = parse({**base, **fields}, SERVED, 0.0)
        except RequestError as error:
            statuses.add(error.status)
        else:
            for request in generation.requests:
                assert 0 < len(request.prompt_ids) < N
                assert 1 <= request.params.max_tokens <= N - len(request.prompt_ids)
                assert 0 <= request.params.temperature <= 2
                assert 0 < request.params.top_p <= 1
                assert 0 <= request.params.seed < 2**64
    assert statuses <= {400, 404}


@given(st.binary(max_size=60) | anything.map(json.dumps).map(str.encode))
def test_whatever_the_bytes_are_reading_them_gives_json_or_a_client_error(raw):
    try:
        body = loads(raw)
    except RequestError:
        return
    json.dumps(body, allow_nan=False)
