"""A model with several chat templates: which one a request is rendered with, and how its calls are read."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.errors import ConfigError, RequestError
from jaxserve.server.openai import parse_chat
from jaxserve.tokenizer.chat import ChatTemplate
from tests.fakes import FakeTokenizer
from tests.server.running import CHAT_TEMPLATE, RunningServer, served_model
from tests.server.scripted import scripted
from tests.server.test_tools import CALL, CONFIG, MESSAGES, WEATHER, WITH_TOOLS, calls_of, whole

OTHERS = {
    "tool_use": "T:" + WITH_TOOLS.replace("MARKER", "<tool_call>"),
    "rag": "R{{ documents | length }}:" + CHAT_TEMPLATE,
    "mistral": "M:" + WITH_TOOLS.replace("MARKER", "[TOOL_CALLS]"),
}


def several(**others: str) -> ChatTemplate:
    return ChatTemplate("D:" + CHAT_TEMPLATE, bos_token="<bos>", eos_token="<eos>", others=others)


def model(**served: Any) -> Any:
    return served_model(CONFIG, **{"chat_template": several(**OTHERS), **served})


def rendered(served: Any, **fields: Any) -> str:
    (request,) = parse_chat({"messages": MESSAGES, **fields}, served, 0.0).requests
    return FakeTokenizer().decode(request.prompt_ids, skip_special=False)


@pytest.mark.parametrize(
    ("fields", "first"),
    [
        ({}, "D:"),
        ({"chat_template": None}, "D:"),
        ({"tools": [WEATHER]}, "T:"),
        ({"tools": [WEATHER], "tool_choice": "none"}, "D:"),
        ({"tools": []}, "D:"),
        ({"chat_template": "tool_use"}, "T:"),
        ({"chat_template": "default", "tools": [WEATHER]}, "D:"),
        ({"chat_template": "rag", "chat_template_kwargs": {"documents": ["a", "b"]}}, "R2:"),
        ({"chat_template": "mistral", "tools": [WEATHER]}, "M:"),
    ],
)
def test_the_template_is_the_named_one_else_that_for_tools_where_there_are_tools_else_the_default(
    fields, first
):
    assert rendered(model(), **fields).startswith(first)


def test_a_model_of_one_template_uses_it_for_tools_too():
    served = served_model(CONFIG, chat_template=several())
    assert rendered(served, tools=[WEATHER]).startswith("D:")


def test_a_template_by_another_name_or_a_template_itself_is_refused_with_the_names_there_are():
    for name in ("{{ 1 }}", "", "nix"):
        with pytest.raises(RequestError, match="not supported") as caught:
            rendered(model(), chat_template=name)
        assert (caught.value.param, caught.value.code) == ("chat_template", "unsupported_parameter")
        assert "default, tool_use, rag, mistral" in caught.value.message
    with pytest.raises(RequestError) as caught:
        rendered(served_model(CONFIG, chat_template=None), chat_template="rag")
    assert caught.value.code == "no_chat_template"


def test_variables_are_those_of_the_template_that_is_used():
    with pytest.raises(RequestError, match="can be set: none"):
        rendered(model(), chat_template_kwargs={"documents": []})
    assert rendered(model(), chat_template="rag", chat_template_kwargs={"documents": [1]}).startswith("R1:")


def test_calls_are_read_as_the_template_that_was_used_has_them_written():
    with RunningServer(config=CONFIG, fake_model=scripted(CALL), chat_template=several(**OTHERS)) as server:
        [choice] = whole(server, tools=[WEATHER])
        assert calls_of(choice) == [("get_weather", '{"city": "Paris"}')]
        [choice] = whole(server, tools=[WEATHER], chat_template="mistral")
        assert choice["message"]["content"] == CALL
    written = '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]'
    with RunningServer(
        config=CONFIG, fake_model=scripted(written), chat_template=several(**OTHERS)
    ) as server:
        [choice] = whole(server, tools=[WEATHER], chat_template="mistral")
        assert calls_of(choice) == [("get_weather", '{"city": "Paris"}')]


def test_a_parser_of_the_users_is_for_the_template_that_is_used_with_tools():
    served = model(tool_call_parser="mistral")
    names = {None if t is None else t.name: s.tool_format for t, s in served.speeches.items()}
    assert names["tool_use"].name == "mistral"
    assert names["rag"].name == "hermes"
    with pytest.raises(ConfigError, match="knows no tools"):
        _ = served_model(CONFIG, chat_template=several(rag="x"), tool_call_parser="mistral").speeches


def test_tokenize_and_tokenizer_info_know_them_too():
    rag = {"chat_template": "rag", "chat_template_kwargs": {"documents": ["a"]}}
    with RunningServer(config=CONFIG, chat_template=several(**OTHERS)) as server:
        for fields in ({"tools": [WEATHER]}, rag, {}):
            body = {"messages": MESSAGES, **fields}
            ids = server.post("/tokenize", body)[1]["tokens"]
            assert FakeTokenizer().decode(ids, skip_special=False) == rendered(server.model, **fields)
        info = server.get("/tokenizer_info")[1]
        assert info["chat_template"] == "D:" + CHAT_TEMPLATE
        assert info["chat_template_names"] == ["default", *OTHERS]
