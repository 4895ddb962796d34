"""Tools and schemas of /v1/responses over HTTP, over a fake model whose answer the test writes."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import openai
import pytest

from tests.fakes import FakeModel
from tests.server.running import RunningServer
from tests.server.scripted import scripted
from tests.server.test_responses import PATH, events_of, text_of
from tests.server.test_tools import CALL, CALL_NOW, PARAMETERS, serving

WEATHER = {"type": "function", "name": "get_weather", "parameters": PARAMETERS}
NOW = {"type": "function", "name": "now", "description": "the time"}
CALLS = [("get_weather", '{"city": "Paris"}'), ("now", "{}")]
FORM = {"format": {"type": "json_schema", "name": "weather", "schema": PARAMETERS, "strict": True}}


def whole(server: RunningServer, **fields: Any) -> dict[str, Any]:
    body = {"input": "x", "max_output_tokens": 400, **fields}
    status, answer = server.post(PATH, body)
    assert status == 200, answer
    return answer


def streamed(server: RunningServer, **fields: Any) -> dict[str, Any]:
    """The last event's answer, of which the events before have told every item, letter by letter."""
    body = {"input": "x", "max_output_tokens": 400, **fields, "stream": True}
    status, _, raw = server.request("POST", PATH, body)
    assert status == 200, raw
    items: list[dict[str, Any]] = []
    texts: list[str] = []
    for event in events_of(raw):
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            assert event["item"]["status"] == "in_progress"
            items.append(event["item"])
            texts.append("")
        elif kind in ("output_text.delta", "function_call_arguments.delta"):
            assert event["item_id"] == items[event["output_index"]]["id"]
            texts[event["output_index"]] += event["delta"]
        elif kind in ("output_text.done", "function_call_arguments.done"):
            assert (event.get("text") or event.get("arguments") or "") == texts[event["output_index"]]
        elif kind == "output_item.done":
            assert event["item"]["id"] == items[event["output_index"]]["id"]
            items[event["output_index"]] = event["item"]
    answer = event["response"]
    assert items == answer["output"]
    for item, text in zip(items, texts):
        assert text == (item["arguments"] if item["type"] == "function_call" else item["content"][0]["text"])
    return answer


def calls_of(answer: dict[str, Any]) -> list[tuple[str, str]]:
    return [(item["name"], item["arguments"]) for item in answer["output"] if item["type"] == "function_call"]


@pytest.mark.parametrize("read", [whole, streamed])
def test_calls_that_the_model_writes_are_items_of_the_answer(read):
    with serving(scripted(f"Let me see.\n{CALL}\n{CALL_NOW}")) as server:
        answer = read(server, tools=[WEATHER, NOW])
        assert [item["type"] for item in answer["output"]] == ["message", "function_call", "function_call"]
        assert text_of(answer) == "Let me see."
        assert calls_of(answer) == CALLS
        assert answer["status"] == "completed"
        assert [tool["name"] for tool in answer["tools"]] == ["get_weather", "now"]
        ids = [item["call_id"] for item in answer["output"][1:]]
        assert len(set(ids)) == 2
        assert all(item["status"] == "completed" for item in answer["output"])


@pytest.mark.parametrize("read", [whole, streamed])
def test_without_tools_the_same_text_is_text(read):
    with serving(scripted(CALL)) as server:
        answer = read(server)
        assert text_of(answer) == CALL
        assert calls_of(answer) == []


@pytest.mark.parametrize("read", [whole, streamed])
@pytest.mark.parametrize(
    ("choice", "names"),
    [("required", {"get_weather", "now"}), ({"type": "function", "name": "get_weather"}, {"get_weather"})],
)
def test_a_forced_call_follows_its_schema_whatever_the_model_would_say(read, choice, names):
    with serving(FakeModel(eos_every=3)) as server:
        answer = read(server, tools=[WEATHER, NOW], tool_choice=choice, parallel_tool_calls=False, seed=1)
        [(name, arguments)] = calls_of(answer)
        assert name in names
        if answer["status"] == "completed":
            jsonschema.validate(
                json.loads(arguments), PARAMETERS if name == "get_weather" else {"type": "object"}
            )
        assert answer["tool_choice"] == choice


@pytest.mark.parametrize("read", [whole, streamed])
def test_a_call_that_is_cut_off_is_incomplete(read):
    with serving(scripted(CALL)) as server:
        answer = read(server, tools=[WEATHER], max_output_tokens=55)
        assert answer["status"] == "incomplete"
        assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
        [item] = answer["output"]
        assert (item["type"], item["status"]) == ("function_call", "incomplete")
        assert '{"city": "Paris"}'.startswith(item["arguments"])


def test_a_result_goes_back_to_the_model_by_the_official_client_and_it_goes_on():
    with (
        serving(scripted(CALL)) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
    ):
        first = client.responses.create(model="fake-model", input="Weather?", tools=[WEATHER])
        [call] = first.output
        assert call.type == "function_call"
        items: list[Any] = [
            {"role": "user", "content": "Weather?"},
            call.model_dump(),
            {"type": "function_call_output", "call_id": call.call_id, "output": "rain"},
        ]
        second = client.responses.create(model="fake-model", input=items, tools=[WEATHER])
        assert second.usage.input_tokens > first.usage.input_tokens
        fields = {
            "tools": [{"type": "function", "function": {k: v for k, v in WEATHER.items() if k != "type"}}]
        }
        function = {"name": call.name, "arguments": call.arguments}
        messages = [
            {"role": "user", "content": "Weather?"},
            {"role": "assistant", "content": "",
             "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": call.call_id, "content": "rain"},
        ]  # fmt: skip
        _, chat = server.post("/v1/chat/completions", {"messages": messages, **fields})
        assert chat["usage"]["prompt_tokens"] == second.usage.input_tokens


def test_the_official_client_reads_a_streamed_call():
    with (
        serving(scripted(CALL)) as server,
        openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client,
        client.responses.stream(model="fake-model", input="x", tools=[WEATHER]) as stream,
    ):
        arguments = "".join(
            event.delta for event in stream if event.type == "response.function_call_arguments.delta"
        )
        [call] = stream.get_final_response().output
        assert call.type == "function_call"
        assert arguments == call.arguments == '{"city": "Paris"}'


@pytest.mark.parametrize("read", [whole, streamed])
@pytest.mark.parametrize("temperature", [0, 1])
def test_the_text_follows_the_schema_of_its_format(read, temperature):
    with serving(FakeModel(eos_every=3)) as server:
        ended = 0
        for seed in range(3):
            answer = read(server, text=FORM, temperature=temperature, seed=seed)
            assert [item["type"] for item in answer["output"]] == ["message"]
            if answer["status"] == "completed":
                jsonschema.validate(json.loads(text_of(answer)), PARAMETERS)
                ended += 1
            assert answer["text"]["format"]["schema"] == PARAMETERS
        assert ended


@pytest.mark.parametrize("stream", [False, True])
def test_a_schema_that_can_t_be_compiled_is_refused_in_the_words_of_this_route(stream):
    form = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "nix"}}}
    with serving(FakeModel()) as server:
        status, answer = server.post(PATH, {"input": "x", "text": form, "stream": stream})
        assert status == 400
        assert answer["error"]["param"] == "text.format.schema"
        assert answer["error"]["code"] == "invalid_grammar"
        assert "'text.format.schema'" in answer["error"]["message"]
