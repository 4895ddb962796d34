"""/v1/responses: the same answers as a chat's, in OpenAI's newer shape."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest

from jaxserve.server.openai import parse_chat
from jaxserve.server.response_render import ResponseRenderer
from jaxserve.server.responses import parse_responses
from jaxserve.server.tooling import Reading
from jaxserve.tools.formats import FORMATS
from jaxserve.types import Event
from tests.fakes import FakeModel
from tests.server.running import RunningServer, raw_post, served_model
from tests.server.test_raw_sockets import read_all

PATH = "/v1/responses"
SEED = {"seed": 0}
SEEDED = {"temperature": 0, "seed": 0}
TOOL = {"type": "function", "name": "weather", "parameters": {"type": "object"}}


@pytest.fixture
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0)


def events_of(raw: bytes) -> list[dict[str, Any]]:
    frames = raw.decode("ascii").split("\n\n")
    assert frames.pop() == ""
    events = []
    for frame in frames:
        name, _, data = frame.partition("\n")
        assert data.startswith("data: ")
        events.append(json.loads(data[6:]))
        assert name == f"event: {events[-1]['type']}"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def text_of(answer: dict[str, Any]) -> str:
    return "".join(
        part["text"] for item in answer["output"] if item["type"] == "message" for part in item["content"]
    )


@pytest.mark.parametrize("path", [PATH, "/responses"])
@pytest.mark.parametrize(
    ("asked", "messages"),
    [
        ({"input": "ab the"}, [("user", "ab the")]),
        ({"input": "x", "instructions": "be brief"}, [("system", "be brief"), ("user", "x")]),
        (
            {"input": [{"role": "developer", "content": "a"},
                       {"type": "message", "role": "user", "content": "b"}]},
            [("developer", "a"), ("user", "b")],
        ),
        (
            {"input": [
                {"role": "user", "content": [{"type": "input_text", "text": "one"},
                                             {"type": "input_text", "text": "two"}]},
                {"type": "message", "id": "msg_1", "status": "completed", "role": "assistant",
                 "content": [{"type": "output_text", "text": "three", "annotations": []}]},
                {"role": "user", "content": "four"},
            ]},
            [("user", "one\ntwo"), ("assistant", "three"), ("user", "four")],
        ),
    ],
)  # fmt: skip
def test_the_answer_is_the_one_that_a_chat_gets(server, path, asked, messages):
    chat = {"messages": [{"role": role, "content": text} for role, text in messages], "max_tokens": 12}
    _, expected = server.post("/v1/chat/completions", {**chat, **SEEDED})
    status, answer = server.post(path, {**asked, "max_output_tokens": 12, **SEEDED})
    assert status == 200
    assert text_of(answer) == expected["choices"][0]["message"]["content"]
    assert answer["usage"]["input_tokens"] == expected["usage"]["prompt_tokens"]
    assert answer["usage"]["output_tokens"] == expected["usage"]["completion_tokens"] == 12
    assert answer["status"] == "incomplete"
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert answer["store"] is False


def test_a_stream_has_the_events_of_the_whole_answer_in_order(server):
    body = {"input": "x", "max_output_tokens": 9, **SEEDED, "metadata": {"a": "b"}}
    _, whole = server.post(PATH, body)
    status, headers, raw = server.request("POST", PATH, {**body, "stream": True})
    assert status == 200
    assert headers["Content-Type"].startswith("text/event-stream")
    events = events_of(raw)
    kinds = [event["type"] for event in events if event["type"] != "response.output_text.delta"]
    assert kinds == [
        "response.created", "response.in_progress", "response.output_item.added",
        "response.content_part.added", "response.output_text.done", "response.content_part.done",
        "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == text_of(whole)
    assert {event["item_id"] for event in deltas} == {events[-1]["response"]["output"][0]["id"]}
    last = events[-1]["response"]
    assert text_of(last) == text_of(whole)
    for name in ("input_tokens", "output_tokens", "total_tokens"):
        assert last["usage"][name] == whole["usage"][name]
    assert last["metadata"] == {"a": "b"}
    assert events[0]["response"]["status"] == "in_progress"


def test_an_answer_that_ends_by_itself_is_completed():
    with RunningServer(fake_model=FakeModel(eos_every=4)) as running:
        _, answer = running.post(PATH, {"input": "x", **SEEDED})
        assert answer["status"] == "completed"
        assert answer["incomplete_details"] is None
        assert answer["output"][0]["status"] == "completed"


def test_the_openai_client_understands_answers_and_streams(client):
    whole = client.responses.create(
        model="fake-model", input="x", max_output_tokens=8, temperature=0, extra_body=SEED
    )
    assert whole.output_text
    with client.responses.stream(
        model="fake-model", input="x", max_output_tokens=8, temperature=0, extra_body=SEED
    ) as stream:
        seen = [event.delta for event in stream if event.type == "response.output_text.delta"]
        assert "".join(seen) == whole.output_text
    text = ""
    for event in client.responses.create(
        model="fake-model", input="x", max_output_tokens=8, temperature=0, extra_body=SEED, stream=True
    ):
        if event.type == "response.incomplete":
            text = event.response.output_text
    assert text == whole.output_text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [5]}, "input[0]"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, None),
        ({"input": "x", "store": True}, "store"),
        ({"input": "x", "previous_response_id": "resp_1"}, "previous_response_id"),
        ({"input": "x", "background": True}, "background"),
        ({"input": "x", "truncation": "auto"}, "truncation"),
        ({"input": "x", "include": ["message.output_text.logprobs"]}, "include"),
        ({"input": "x", "reasoning": {"effort": "low"}}, "reasoning"),
        ({"input": "x", "max_output_tokens": 0}, "max_output_tokens"),
        ({"input": "x", "max_output_tokens": 10_000}, "max_output_tokens"),
        ({"input": "x" * 400}, "input"),
        ({"input": "refuse me"}, None),
        ({"input": "x", "temperature": 3}, "temperature"),
        ({"input": "x", "tools": [{"type": "web_search"}]}, None),
        ({"input": "x", "tool_choice": "required"}, "tool_choice"),
        ({"input": "x", "text": {"format": {"type": "json_schema"}}}, "text.format.schema"),
        ({"input": "x", "stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"input": "x", "logit_bias": {"99999": 1}}, "logit_bias"),
    ],
)
def test_what_can_not_be_honoured_is_400_in_the_words_of_this_route(server, fields, param):
    status, answer = server.post(PATH, fields)
    assert status == 400, answer
    error = answer["error"]
    assert param is None or error["param"] == param
    assert "message" not in (error["param"] or "")
    assert "max_completion_tokens" not in error["message"]
    assert "response_format" not in error["message"]


def test_text_format_makes_the_answer_follow_its_schema(server):
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    asked = parse_responses({"input": "x", "text": {"format": form}}, server.model, 0.0)
    assert asked.generation.grammar is not None
    same = parse_responses({"input": "x", "text": {"format": {"type": "text"}}}, server.model, 0.0)
    assert same.generation.grammar is None


def rendered(text: str, **reading: Any) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """(events, whole answer) of a text that comes in pieces of three characters."""
    asked = parse_responses({"input": "x", "stream": True}, served_model(), 0.0)
    object.__setattr__(asked.generation, "reading", Reading(**reading))
    answer = ResponseRenderer(asked)
    frames = answer.begin()
    parts = [text[i : i + 3] for i in range(0, len(text), 3)]
    for n, part in enumerate(parts, 1):
        reason = "stop" if n == len(parts) else None
        frames += answer.collect(0, Event("r", 0.0, (n,), part, finish_reason=reason, num_output_tokens=n))
    return events_of(frames.encode()), json.loads(answer.response())


def test_calls_and_reasoning_are_items_of_their_own():
    text = (
        "<think>so be it</think>Let me look.\n<tool_call>\n"
        '{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'
    )
    events, answer = rendered(
        text, tool_format=FORMATS["hermes"], names=frozenset({"weather"}), most_calls=None, thinks=True,
        is_open=False,
    )  # fmt: skip
    assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "function_call"]
    thought, message, call = answer["output"]
    assert "so be it" in thought["content"][0]["text"]
    assert "Let me look." in message["content"][0]["text"]
    assert call["name"] == "weather"
    assert json.loads(call["arguments"]) == {"city": "Bern"}
    assert call["call_id"].startswith("call_")
    assert answer["status"] == "completed"
    assert 0 < answer["usage"]["output_tokens_details"]["reasoning_tokens"] < answer["usage"]["output_tokens"]
    arguments = [e["delta"] for e in events if e["type"] == "response.function_call_arguments.delta"]
    assert "".join(arguments) == call["arguments"]
    done = [e["item"]["type"] for e in events if e["type"] == "response.output_item.done"]
    assert done == ["reasoning", "message", "function_call"]
    added = [e["output_index"] for e in events if e["type"] == "response.output_item.added"]
    assert added == [0, 1, 2]


def test_calls_and_their_results_go_back_as_the_chat_that_they_were():
    items = [
        {"role": "user", "content": "weather?"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "function_call", "call_id": "c1", "name": "weather", "arguments": "{}"},
        {"type": "function_call", "call_id": "c2", "name": "weather", "arguments": '{"city": "Bern"}'},
        {"type": "function_call_output", "call_id": "c1", "output": "rain"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "sun"}]},
    ]
    calls = [
        {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
        {"id": "c2", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Bern"}'}},
    ]
    messages = [
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "tool", "tool_call_id": "c2", "content": "sun"},
    ]
    chat_tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    model = served_model(max_model_len=4096)
    chat = parse_chat({"messages": messages, "tools": [chat_tool]}, model, 0.0)
    asked = parse_responses({"input": items, "tools": [TOOL]}, model, 0.0)
    assert asked.generation.requests[0].prompt_ids == chat.requests[0].prompt_ids


def test_a_failure_before_the_stream_is_a_status_and_later_an_event():
    with RunningServer() as running:
        running.runner.step_s = 0.02
        with running.connect() as connection:
            body = {"input": "x", "stream": True, "max_output_tokens": 200}
            connection.sendall(raw_post(PATH, body, headers="Connection: close\r\n"))
            first = connection.recv(1 << 16)
            running.runner.breaks = True
            received = first + read_all(connection)
        assert received.startswith(b"HTTP/1.1 200")
        assert b'"type":"response.failed"' in received
        assert b'"code":"server_error"' in received
        assert running.request("POST", PATH, {"input": "x"})[0] in (500, 503)


def test_leaving_a_stream_ends_the_request(server):
    server.runner.hold()
    with server.connect() as connection:
        connection.sendall(raw_post(PATH, {"input": "x", "stream": True}))
        server.wait(lambda: server.server.num_open == 1)
    server.wait(lambda: server.server.num_open == 0)
    server.runner.release()
