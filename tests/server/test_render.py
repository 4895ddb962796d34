from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.server.openai import parse_chat, parse_completion
from jaxserve.server.render import Renderer, renderer
from jaxserve.server.sse import DONE, frame
from jaxserve.types import Event
from tests.server.running import served_model

SERVED = served_model()

USAGE = {
    "prompt_tokens": 2,
    "completion_tokens": 8,
    "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 0},
}


def completion(**fields: Any) -> Renderer:
    return renderer(parse_completion({"prompt": ["ab", "c"], **fields}, SERVED, 0.0))


def chat(**fields: Any) -> Renderer:
    messages = [{"role": "user", "content": "x"}]
    return renderer(parse_chat({"messages": messages, **fields}, SERVED, 0.0))


def piece(text: str, num_output_tokens: int = 1, **fields: Any) -> Event:
    return Event("id", 0.0, text=text, num_output_tokens=num_output_tokens, **fields)


def test_events_stand_on_the_wire_byte_for_byte():
    assert frame(['{"a":1}', '{"b":"\\n"}']) == b'data: {"a":1}\n\ndata: {"b":"\\n"}\n\n'
    assert DONE == b"data: [DONE]\n\n"
    assert frame([]) == b""


def test_a_completion_chunk_is_exactly_this():
    answer = completion(stream=True)
    g = answer._generation
    [chunk] = answer.chunks(1, piece('a "b"\n\u2028é'))
    assert chunk == (
        f'{{"id":"{g.id}","object":"text_completion","created":{g.created},"model":"fake-model",'
        f'"system_fingerprint":"{g.fingerprint}","choices":[{{"index":1,"text":"a \\"b\\"\\n\\u2028\\u00e9",'
        '"logprobs":null,"finish_reason":null,"stop_reason":null}]}'
    )


@given(st.text())
def test_any_text_survives_the_wire_on_one_line(text):
    for answer, read in (
        (completion(stream=True), lambda choice: choice["text"]),
        (chat(stream=True), lambda choice: choice["delta"]["content"]),
    ):
        chunks = answer.chunks(0, piece(text))
        raw = frame(chunks)
        assert len(raw.splitlines()) == 2 * len(chunks)
        if text:
            assert read(json.loads(chunks[-1])["choices"][0]) == text


def test_the_first_chat_chunk_has_the_role_and_no_other_has():
    answer = chat(stream=True)
    events = [piece(""), piece("a"), piece("b", finish_reason="stop")]
    deltas = [
        json.loads(chunk)["choices"][0]["delta"] for event in events for chunk in answer.chunks(0, event)
    ]
    assert deltas == [{"role": "assistant", "content": ""}, {"content": "a"}, {"content": "b"}, {}]


def test_the_finish_chunk_has_no_content():
    for answer, empty in ((completion(stream=True), {"text": ""}), (chat(stream=True), {"delta": {}})):
        *_, text, finish = answer.chunks(0, piece("end", finish_reason="stop", stop_reason="."))
        assert json.loads(text)["choices"][0]["finish_reason"] is None
        choice = json.loads(finish)["choices"][0]
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", ".")
        assert empty.items() <= choice.items()


def test_an_event_without_text_shows_nothing():
    assert completion(stream=True).chunks(0, piece("")) == []


def test_no_chunk_speaks_of_usage_unless_it_was_asked_for():
    chunks = completion(stream=True).chunks(0, piece("x", finish_reason="stop"))
    assert len(chunks) == 2
    assert all("usage" not in json.loads(chunk) for chunk in chunks)


def test_with_include_usage_every_chunk_has_a_null_and_the_last_one_the_sum():
    answer = completion(stream=True, stream_options={"include_usage": True})
    for index, count in ((0, 3), (1, 5)):
        for chunk in answer.chunks(index, piece("x", count, finish_reason="length")):
            assert json.loads(chunk)["usage"] is None
    last = json.loads(answer.usage_chunk())
    assert last["choices"] == []
    assert last["usage"] == USAGE


def test_continuous_usage_counts_the_tokens_of_each_choice_so_far():
    answer = completion(stream=True, stream_options={"continuous_usage_stats": True})
    seen = []
    for index, count in ((0, 1), (1, 1), (0, 2), (1, 4)):
        for chunk in answer.chunks(index, piece("x", count)):
            seen.append(json.loads(chunk)["usage"]["completion_tokens"])
    assert seen == [1, 1, 2, 4]


def test_id_created_and_model_are_the_same_in_every_chunk():
    answer = chat(stream=True, stream_options={"include_usage": True})
    events = [piece("a"), piece("b", finish_reason="stop")]
    chunks = [chunk for event in events for chunk in answer.chunks(0, event)] + [answer.usage_chunk()]
    heads = {tuple(json.loads(c)[k] for k in ("id", "created", "model", "object")) for c in chunks}
    assert len(heads) == 1
    assert heads.pop()[3] == "chat.completion.chunk"


def test_a_whole_completion_has_every_choice_in_order_and_the_sum_of_usage():
    answer = completion()
    for index, event in ((1, piece("c", 1)), (0, piece("a", 2)), (1, piece("d", 3))):
        answer.collect(index, event)
    answer.collect(0, piece("b", 4, finish_reason="length"))
    answer.collect(1, piece("", 4, finish_reason="stop", stop_reason=7))
    body = json.loads(answer.response())
    assert body["object"] == "text_completion"
    assert body["choices"] == [
        {"index": 0, "text": "ab", "logprobs": None, "finish_reason": "length", "stop_reason": None},
        {"index": 1, "text": "cd", "logprobs": None, "finish_reason": "stop", "stop_reason": 7},
    ]
    assert body["usage"] == USAGE


def test_a_whole_chat_answer_spells_out_what_clients_validate():
    answer = chat()
    answer.collect(0, piece("hi", finish_reason="stop"))
    body = json.loads(answer.response())
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"] == {
        "role": "assistant", "content": "hi", "refusal": None, "annotations": [],
    }  # fmt: skip
    assert body["choices"][0]["logprobs"] is None
