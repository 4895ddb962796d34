"""Tools and reasoning over HTTP: a whole server, over a fake model whose answer the test writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jsonschema
import openai
import pytest
from pydantic import BaseModel

from jaxserve.engine.config import EngineConfig
from jaxserve.errors import ConfigError, RequestError
from jaxserve.server.openai import Generation, parse_chat
from jaxserve.tokenizer.chat import ChatTemplate
from tests.fakes import FakeModel, FakeTokenizer
from tests.server.running import CHAT_TEMPLATE, MODEL, RunningServer, served_model
from tests.server.scripted import scripted

CONFIG = EngineConfig(max_model_len=2048, num_pages=2049, page_size=4, max_num_seqs=4, max_num_queued=64)
WITH_TOOLS = (
    "{% for tool in tools or [] %}<turn>tools\n{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}<turn>{{ m.role }}\n{{ m.content }}"
    "{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{% for c in m.tool_calls or [] %}{{ c.id }}:{{ c.function.name }}:{{ c.function.arguments.city }}"
    "{% endfor %}"
    "{% if m.tool_call_id %}={{ m.tool_call_id }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<turn>assistant\n{% endif %}{# MARKER #}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}
NOW = {"type": "function", "function": {"name": "now", "description": "the time"}}
MESSAGES = [{"role": "user", "content": "x"}]
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'
CALL_NOW = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def template(source: str) -> ChatTemplate:
    return ChatTemplate(source, bos_token="<bos>", eos_token="<eos>")


def with_format(marker: str) -> ChatTemplate:
    return template(WITH_TOOLS.replace("MARKER", marker))


@contextmanager
def serving(model: FakeModel, **served: Any) -> Iterator[RunningServer]:
    defaults = {"chat_template": with_format("<tool_call>")}
    with RunningServer(config=CONFIG, fake_model=model, **{**defaults, **served}) as server:
        yield server


def whole(server: RunningServer, **fields: Any) -> list[dict[str, Any]]:
    body = {"messages": MESSAGES, "tools": [WEATHER, NOW], "max_tokens": 400, **fields}
    status, answer = server.post("/v1/chat/completions", body)
    assert status == 200, answer
    return answer["choices"]


def streamed(server: RunningServer, **fields: Any) -> list[dict[str, Any]]:
    """The choices that the deltas add up to, put together as OpenAI's clients do."""
    body = {"messages": MESSAGES, "tools": [WEATHER, NOW], "max_tokens": 400, **fields}
    choices: dict[int, dict[str, Any]] = {}
    for event in server.stream("/v1/chat/completions", body)[:-1]:
        for choice in event["choices"]:
            made = choices.setdefault(choice["index"], {"message": {"content": ""}, "calls": []})
            delta = choice["delta"]
            assert ("role" in delta) == (made["message"] == {"content": ""} and "role" not in made)
            made["role"] = True
            for key in ("content", "reasoning_content"):
                if key in delta:
                    made["message"][key] = made["message"].get(key, "") + delta[key]
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    assert call["index"] == len(made["calls"])
                    assert call["type"] == "function"
                    assert call["function"]["arguments"] == ""
                    made["calls"].append([call["function"]["name"], "", call["id"]])
                else:
                    assert call.keys() == {"index", "function"}
                    made["calls"][call["index"]][1] += call["function"]["arguments"]
            if choice["finish_reason"]:
                made["finish_reason"] = choice["finish_reason"]
    return [choices[i] for i in sorted(choices)]


def calls_of(choice: dict[str, Any]) -> list[tuple[str, str]]:
    if "calls" in choice:
        return [(name, arguments) for name, arguments, _ in choice["calls"]]
    calls = choice["message"].get("tool_calls", [])
    return [(call["function"]["name"], call["function"]["arguments"]) for call in calls]


def parse(**fields: Any) -> Generation:
    served = {key: fields.pop(key) for key in ("chat_template", "tool_call_parser") if key in fields}
    model = served_model(CONFIG, **{"chat_template": with_format("<tool_call>"), **served})
    return parse_chat({"messages": MESSAGES, **fields}, model, 0.0)


def prompt(**fields: Any) -> str:
    return FakeTokenizer().decode(parse(**fields).requests[0].prompt_ids, skip_special=False)


@pytest.mark.parametrize("read", [whole, streamed])
def test_calls_that_the_model_writes_are_told_as_calls(read):
    with serving(scripted(f"Let me see.\n{CALL}\n{CALL_NOW}")) as server:
        for choice in read(server, n=2):
            assert choice["message"]["content"] == "Let me see."
            assert calls_of(choice) == [("get_weather", '{"city": "Paris"}'), ("now", "{}")]
            assert choice["finish_reason"] == "tool_calls"


def test_a_call_has_an_id_of_its_own_and_the_message_no_text():
    with serving(scripted(CALL + CALL_NOW)) as server:
        [choice] = whole(server)
        message = choice["message"]
        assert message["content"] is None
        ids = [call["id"] for call in message["tool_calls"]]
        assert len(set(ids)) == 2
        assert all(call_id.startswith("call_") for call_id in ids)
        assert all(call["type"] == "function" for call in message["tool_calls"])


@pytest.mark.parametrize("read", [whole, streamed])
def test_a_call_that_is_cut_off_says_length(read):
    with serving(scripted(CALL)) as server:
        for most in (5, 55):
            [choice] = read(server, max_tokens=most)
            assert choice["finish_reason"] == "length"
            assert bool(calls_of(choice)) == (most == 55)


@pytest.mark.parametrize("read", [whole, streamed])
def test_without_parallel_calls_the_first_is_the_only_one(read):
    with serving(scripted(CALL + CALL_NOW)) as server:
        [choice] = read(server, parallel_tool_calls=False)
        assert calls_of(choice) == [("get_weather", '{"city": "Paris"}')]


def test_with_tool_choice_none_the_model_hears_of_no_tool_and_its_text_is_text():
    with serving(scripted(CALL)) as server:
        [choice] = whole(server, tool_choice="none")
        assert choice["message"]["content"] == CALL
        assert "tool_calls" not in choice["message"]
        assert choice["finish_reason"] == "stop"
    assert "get_weather" in prompt(tools=[WEATHER])
    assert "get_weather" not in prompt(tools=[WEATHER], tool_choice="none")


FORMATS = ("<tool_call>", "[TOOL_CALLS]", "<|python_tag|>", "json")


@pytest.mark.parametrize(("marker", "read"), [*((one, whole) for one in FORMATS), ("<tool_call>", streamed)])
def test_required_makes_the_model_call_and_follow_the_schema_in_every_format(marker, read):
    with serving(FakeModel(eos_every=2), chat_template=with_format(marker)) as server:
        ends = set()
        for seed in range(3):
            single = {"parallel_tool_calls": False} if seed else {}
            [choice] = read(server, tool_choice="required", seed=seed, max_tokens=160, **single)
            ends.add(choice["finish_reason"])
            if choice["finish_reason"] == "length":
                continue
            assert calls_of(choice)
            assert not choice["message"]["content"]
            for name, arguments in calls_of(choice):
                if name == "get_weather":
                    jsonschema.validate(json.loads(arguments), PARAMETERS)
                else:
                    assert (name, json.loads(arguments)) == ("now", {})
        assert "tool_calls" in ends


@pytest.mark.parametrize("marker", FORMATS)
def test_a_named_function_is_called_exactly_once(marker):
    choice = {"type": "function", "function": {"name": "get_weather"}}
    with serving(FakeModel(eos_every=2), chat_template=with_format(marker)) as server:
        for seed in range(2):
            [answer] = whole(server, tool_choice=choice, seed=seed)
            [(name, arguments)] = calls_of(answer)
            assert name == "get_weather"
            jsonschema.validate(json.loads(arguments), PARAMETERS)
            assert answer["finish_reason"] == "tool_calls"


def test_a_strict_function_is_called_by_its_schema_or_not_at_all():
    only_paris = {**PARAMETERS, "properties": {"city": {"enum": ["Paris"]}}}
    strict = {
        "type": "function",
        "function": {"name": "get_weather", "strict": True, "parameters": only_paris},
    }
    # As long as the word that the schema leaves it, so the script goes on where it was.
    wrong = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Tokyo"}}\n</tool_call>'
    with serving(scripted(f"Well. {wrong}")) as server:
        [loose] = whole(server)
        assert calls_of(loose) == [("get_weather", '{"city": "Tokyo"}')]
        [choice] = whole(server, tools=[strict])
        assert calls_of(choice) == [("get_weather", '{"city": "Paris"}')]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Well.", "tool_calls")
    with serving(scripted("Just text.")) as server:
        [choice] = whole(server, tools=[strict])
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Just text.", "stop")


def test_a_response_format_holds_for_answers_that_call_nothing():
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, "two"]}}}
    with serving(scripted('"two"')) as server:
        [choice] = whole(server, response_format=form)
        assert json.loads(choice["message"]["content"]) == "two"
    with serving(scripted(CALL)) as server:
        [choice] = whole(server, response_format=form, parallel_tool_calls=False)
        assert calls_of(choice) == [("get_weather", '{"city": "Paris"}')]


def test_the_template_gets_tools_calls_results_and_reasoning():
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [
            {"id": "call_1", "type": "function",
             "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}},
        ]},
        {"role": "tool", "tool_call_id": "call_1", "content": "rain"},
    ]  # fmt: skip
    tool = json.dumps({"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}})
    assert prompt(messages=messages, tools=[WEATHER]) == (
        f"<turn>tools\n{tool}<turn>user\nq<turn>assistant\n(hm)call_1:get_weather:Rome"
        "<turn>tool\nrain=call_1<turn>assistant\n"
    )


def test_mistral_s_templates_get_ids_of_nine_letters_that_still_match():
    messages = [
        {"role": "assistant", "tool_calls": [{"id": "call_123", "function": {"name": "f"}}]},
        {"role": "tool", "tool_call_id": "call_123", "content": "rain"},
    ]
    text = prompt(messages=messages, tools=[WEATHER], chat_template=with_format("[TOOL_CALLS]"))
    call_id = text.partition(":f:")[0][-9:]
    assert call_id.isalnum()
    assert f"rain={call_id}" in text
    with serving(FakeModel(eos_every=2), chat_template=with_format("[TOOL_CALLS]")) as server:
        [choice] = whole(server, tool_choice={"type": "function", "function": {"name": "now"}})
        assert len(choice["message"]["tool_calls"][0]["id"]) == 9


def test_a_template_that_knows_no_tools_is_told_of_them_in_plain_text():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "q"},
        {"role": "assistant", "tool_calls": [{"id": "a", "function": {"name": "now", "arguments": "{}"}}]},
        {"role": "tool", "tool_call_id": "a", "content": "noon"},
        {"role": "tool", "tool_call_id": "b", "content": "rain"},
    ]
    plain = template(CHAT_TEMPLATE)
    text = prompt(messages=messages, tools=[WEATHER, NOW], chat_template=plain)
    system, user, assistant, results, last = text.split("<turn>")[1:]
    assert system.startswith("system\nBe brief.\n\n")
    assert json.dumps(PARAMETERS) in system
    assert "the time" in system
    assert user == "user\nq"
    assert assistant == 'assistant\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert results == (
        "user\n<tool_response>\nnoon\n</tool_response>\n<tool_response>\nrain\n</tool_response>"
    )
    assert last == "assistant\n"
    assert prompt(tools=[NOW], chat_template=plain).startswith("<turn>system\nYou can call")
    with serving(scripted(CALL), chat_template=plain) as server:
        [choice] = whole(server)
        assert calls_of(choice) == [("get_weather", '{"city": "Paris"}')]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "now"}}}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "now"}}},
         "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [WEATHER, WEATHER]}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "code"}]}, "tools[0].type"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
         "tools[0].function.parameters"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "y"}]}, "messages[0].tool_call_id"),
        ({"messages": [{"role": "user", "tool_calls": [{"function": {"name": "f"}}]}]},
         "messages[0].tool_calls"),
        ({"messages": [{"role": "user", "reasoning_content": "x"}]}, "messages[0].reasoning_content"),
    ],
)  # fmt: skip
def test_wrong_tools_and_messages_are_refused_by_name(fields, param):
    with pytest.raises(RequestError) as caught:
        parse(**fields)
    assert caught.value.param == param


def test_parameters_that_can_t_be_forced_are_a_400_that_quotes_the_reason():
    bad = {"type": "function", "function": {"name": "f", "parameters": {"type": "nix"}}}
    with serving(FakeModel()) as server:
        body = {"messages": MESSAGES, "tools": [bad], "tool_choice": "required", "max_tokens": 5}
        status, answer = server.post("/v1/chat/completions", body)
        assert (status, answer["error"]["param"]) == (400, "tools")
        assert "nix" in answer["error"]["message"]


def test_a_model_that_writes_calls_in_an_unknown_format_refuses_tools_until_told_the_parser():
    xml = with_format("<tool_call><function=")
    with pytest.raises(RequestError, match="--tool-call-parser"):
        parse(tools=[WEATHER], chat_template=xml)
    assert parse(chat_template=xml).reading is None
    assert parse(tools=[WEATHER], chat_template=xml, tool_call_parser="json").reading is not None


@pytest.mark.parametrize(
    "served", [{"tool_call_parser": "nix"}, {"reasoning_parser": "nix"},
               {"tool_call_parser": "mistral", "chat_template": template(CHAT_TEMPLATE)}],
)  # fmt: skip
def test_a_parser_that_doesn_t_fit_is_an_error_at_the_start(served):
    with pytest.raises(ConfigError, match="_parser"):
        _ = served_model(CONFIG, **{"chat_template": with_format("<tool_call>"), **served}).speeches


class _Tokenizer(FakeTokenizer):
    """With the markers as special tokens, which answers don't show by themselves."""

    MARKERS = ("[TOOL_CALLS]", "<think>", "</think>")

    def __init__(self) -> None:
        super().__init__()
        self._first_marker = len(self._bytes)
        self._bytes = (*self._bytes, *(marker.encode() for marker in self.MARKERS))
        self.vocab_size = len(self._bytes)

    def encode(self, text: str, *, add_bos: bool = False, parse_special: bool = True) -> list[int]:
        for i, marker in enumerate(self.MARKERS if parse_special else (), self._first_marker):
            before, found, behind = text.partition(marker)
            if found:
                return [*self.encode(before, add_bos=add_bos), i, *self.encode(behind)]
        return super().encode(text, add_bos=add_bos, parse_special=parse_special)

    def is_special(self, token_id: int) -> bool:
        return super().is_special(token_id) or token_id >= self._first_marker


@pytest.mark.parametrize("read", [whole, streamed])
def test_markers_that_are_special_tokens_are_seen_and_forced(read):
    tokenizer = _Tokenizer()
    served = {"tokenizer": tokenizer, "chat_template": with_format("[TOOL_CALLS]")}
    script = '<think>hm</think>[TOOL_CALLS][{"name": "now", "arguments": {}}]'
    with serving(scripted(script, tokenizer=tokenizer), **served) as server:
        [choice] = read(server)
        assert choice["message"]["reasoning_content"] == "hm"
        assert calls_of(choice) == [("now", "{}")]
    with serving(FakeModel(eos_every=2), **served) as server:
        called = 0
        for seed in range(4):
            single = {"parallel_tool_calls": False, "max_tokens": 160}
            [choice] = read(server, tool_choice="required", seed=seed, **single)
            called += len(calls_of(choice))
        assert called


THINKS = template(
    CHAT_TEMPLATE.replace("<turn>assistant\n", "<turn>assistant\n<think>")
    + "{# the answer begins inside of <think> #}"
)


@pytest.mark.parametrize("read", [whole, streamed])
@pytest.mark.parametrize("is_open", [False, True])
def test_reasoning_is_told_apart_from_content(read, is_open):
    source = THINKS if is_open else with_format("<tool_call> <think>")
    script = ("" if is_open else "<think>") + "one\ntwo\n</think>\n\nthree"
    model = scripted(script, opening="<think>" if is_open else "")
    with serving(model, chat_template=source) as server:
        [choice] = read(server, tools=[])
        assert choice["message"]["reasoning_content"] == "one\ntwo"
        assert choice["message"]["content"] == "three"
        [choice] = read(server, tools=[], max_tokens=10)
        assert choice["finish_reason"] == "length"
        assert not choice["message"]["content"]


@pytest.mark.parametrize("is_open", [False, True])
def test_structure_is_asked_of_what_comes_behind_the_reasoning(is_open):
    source = THINKS if is_open else with_format("<tool_call> <think>")
    script = ("" if is_open else "<think>") + "free {text}</think>\nno"
    model = scripted(script, opening="<think>" if is_open else "")
    with serving(model, chat_template=source) as server:
        [choice] = whole(server, tools=[], structured_outputs={"choice": ["yes", "no"]})
        assert choice["message"]["reasoning_content"] == "free {text}"
        assert choice["message"]["content"] == "no"


def test_reasoning_stays_in_the_text_where_the_server_is_told_so():
    source = with_format("<tool_call> <think>")
    with serving(scripted("<think>a</think>b"), chat_template=source, reasoning_parser="none") as server:
        [choice] = whole(server, tools=[])
        assert choice["message"] == {
            "role": "assistant", "content": "<think>a</think>b", "refusal": None, "annotations": [],
        }  # fmt: skip


class Verdict(BaseModel):
    warm: bool


def test_the_openai_package_streams_calls_and_parses_structured_answers():
    with serving(scripted(CALL)) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="-") as client:
        with client.chat.completions.stream(
            model=MODEL, messages=MESSAGES, tools=[WEATHER], max_tokens=200
        ) as stream:
            message = stream.get_final_completion().choices[0].message
        assert [(c.function.name, c.function.arguments) for c in message.tool_calls] == [
            ("get_weather", '{"city": "Paris"}')
        ]
    model = replace(scripted('{"warm": true}'))
    with serving(model) as server, openai.OpenAI(base_url=f"{server.url}/v1", api_key="-") as client:
        parsed = client.chat.completions.parse(
            model=MODEL, messages=MESSAGES, response_format=Verdict, max_tokens=200
        )
        assert parsed.choices[0].message.parsed == Verdict(warm=True)
