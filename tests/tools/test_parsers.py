from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.tools.formats import FORMATS
from jaxserve.tools.parsers import CallParser, HermesParser, JsonParser, Llama3Parser, MistralParser
from jaxserve.tools.pieces import Piece, TextParser, joined
from jaxserve.tools.reasoning import AnswerParser, ThinkParser

NAMES = frozenset({"f", "get_weather"})
PARSERS = (HermesParser, MistralParser, JsonParser, Llama3Parser)
# What answers are made of, well-formed or not.
SHARDS = st.sampled_from([
    "<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "<|python_tag|>", "<think>",
    '{"name": "f", "arguments": {"a": 1}}', '{"arguments": {"b": "}"}, "name": "f"}', '{"name": "f"}',
    '{"name": "get_weather", "parameters": {}}', '{"name": "other", "parameters": {}}', "f", "get_weather",
    '{"name": "f", "arguments": "{\\"c\\": [1, 2]}"}', '{"type": "function", "name": "f", "arguments": null}',
    "{", "}", "[", "]", '"', "\\", ",", ";", ":", " ", "\n", "\n\n", "Sure, ", "<", "<tool", "true", "12",
    "é🙂", "</think>",
    '{"name": "f", "arguments": 5}', '{"name": 5}', '{"a": {"b": ["]"]}}', '"name"', '"arguments"',
])  # fmt: skip
TEXTS = st.lists(SHARDS, max_size=9).map("".join)
ARGUMENTS = st.dictionaries(
    st.text(max_size=4),
    st.recursive(
        st.none() | st.booleans() | st.integers(-99, 99) | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
        max_leaves=4,
    ),
    max_size=3,
)
CALLS = st.lists(st.tuples(st.sampled_from(sorted(NAMES)), ARGUMENTS), min_size=1, max_size=3)


def read(parser: TextParser, *pieces: str) -> list[Piece]:
    found: list[Piece] = []
    for piece in pieces:
        found += parser.push(piece)
    return joined(found + parser.finish())


def content(pieces: list[Piece]) -> str:
    return "".join(piece.text for piece in pieces if piece.kind == "content")


def calls(pieces: list[Piece]) -> list[tuple[str, Any]]:
    found: list[tuple[str, str]] = []
    for piece in pieces:
        if piece.kind == "call":
            assert piece.index == len(found), "calls are numbered in their order"
            found.append((piece.text, ""))
        elif piece.kind == "arguments":
            assert piece.index == len(found) - 1, "arguments belong to the call at hand"
            found[-1] = (found[-1][0], found[-1][1] + piece.text)
    return [(name, json.loads(text)) for name, text in found]


def cut(text: str, data: st.DataObject) -> list[str]:
    borders = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return [text[a:b] for a, b in zip([0, *borders], [*borders, len(text)])]


@given(TEXTS, st.data(), st.sampled_from(PARSERS), st.sampled_from([None, False, True]))
@settings(max_examples=150)
def test_where_the_text_is_cut_changes_nothing(text, data, kind, thinks):
    def parser() -> AnswerParser:
        return AnswerParser(None if thinks is None else ThinkParser(thinks), kind(NAMES))

    assert read(parser(), *cut(text, data)) == read(parser(), text)


@given(TEXTS, st.sampled_from(PARSERS))
@settings(max_examples=60)
def test_text_without_a_call_comes_out_as_it_went_in(text, kind):
    pieces = read(kind(NAMES), text)
    if not any(piece.kind == "call" for piece in pieces):
        assert content(pieces) == text


def hermes(made: list[tuple[str, Any]], dump: Any) -> str:
    objects = [dump({"name": name, "arguments": arguments}) for name, arguments in made]
    return "\n".join(f"<tool_call>\n{one}\n</tool_call>" for one in objects)


def llama3(made: list[tuple[str, Any]], dump: Any) -> str:
    return "; ".join(dump({"name": name, "parameters": arguments}) for name, arguments in made)


def listed(made: list[tuple[str, Any]], dump: Any) -> str:
    return dump([{"arguments": arguments, "name": name} for name, arguments in made])


def mistral_new(made: list[tuple[str, Any]], dump: Any) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{dump(arguments)}" for name, arguments in made)


WRITERS: list[tuple[type[CallParser], Any]] = [
    (HermesParser, hermes),
    (Llama3Parser, llama3),
    (Llama3Parser, lambda made, dump: "<|python_tag|>" + llama3(made, dump)),
    (JsonParser, listed),
    (JsonParser, llama3),
    (MistralParser, lambda made, dump: "[TOOL_CALLS] " + listed(made, dump)),
    (MistralParser, mistral_new),
    (MistralParser, lambda made, dump: mistral_new(made, dump).replace("[ARGS]", "[CALL_ID]a1[ARGS]")),
    (MistralParser, lambda made, dump: mistral_new(made, dump).replace("[ARGS]", "")),
]


@given(CALLS, st.sampled_from(WRITERS), st.booleans(), st.sampled_from([None, 1]))
@settings(max_examples=60)
def test_calls_are_read_back_as_they_were_written(made, writer, ascii, indent):
    kind, write = writer

    def dump(value: Any) -> str:
        return json.dumps(value, ensure_ascii=ascii, indent=indent)

    pieces = read(kind(NAMES), write(made, dump))
    assert calls(pieces) == made
    assert content(pieces) == ""


def test_content_stands_before_between_and_behind_marked_calls():
    call = '<tool_call>{"name": "f"}</tool_call>'
    text = f"Let me see.\n{call}\nand\n{call}\nbye "
    pieces = read(HermesParser(NAMES), text)
    assert [piece.text for piece in pieces] == ["Let me see.", "f", "{}", "and", "f", "{}", "bye "]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (HermesParser, "<tool_call> hm </tool_call>"),
        (MistralParser, "[TOOL_CALLS] none"),
        (MistralParser, "[TOOL_CALLS]f[OTHER]{}"),
        (JsonParser, '{"temperature": 20}'),
        (JsonParser, 'It is {"name": "f", "arguments": {}}'),
        (Llama3Parser, '{"name": "unheard_of", "parameters": {}}'),
        (Llama3Parser, "<|python_tag|>print(1)"),
    ],
)
def test_what_only_looks_like_a_call_is_content(kind, text):
    assert read(kind(NAMES), text) == [Piece("content", text)]


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (HermesParser, '<tool_call>{"name": "f", "arguments": {"a": "b'),
        (MistralParser, '[TOOL_CALLS][{"name": "f", "arguments": {"a": "b'),
        (MistralParser, '[TOOL_CALLS]f[ARGS]{"a": "b'),
        (JsonParser, '{"name": "f", "arguments": {"a": "b'),
    ],
)
def test_a_call_that_is_cut_off_is_told_as_far_as_it_went(kind, text):
    assert read(kind(NAMES), text) == [Piece("call", "f"), Piece("arguments", '{"a": "b')]


def test_arguments_come_as_they_are_written_not_at_the_end():
    parser = HermesParser(NAMES)
    assert parser.push('<tool_call>{"name": "f", "arguments": {"a": ') == [
        Piece("call", "f"), Piece("arguments", '{"a": '),
    ]  # fmt: skip
    assert parser.push('"xy') == [Piece("arguments", '"xy')]
    assert parser.push('z"}') == [Piece("arguments", 'z"}')]


def test_calls_past_the_most_are_dropped():
    two = hermes([("f", {}), ("get_weather", {})], json.dumps)
    assert calls(read(AnswerParser(None, HermesParser(NAMES), 1), two)) == [("f", {})]


@pytest.mark.parametrize(
    ("is_open", "text", "thought", "shown"),
    [
        (False, "<think>\nhm\n</think>\n\nyes", "hm", "yes"),
        (False, "\n<think>hm</think>yes <think>", "hm", "yes <think>"),
        (False, "  no <think>hm</think>", "", "  no <think>hm</think>"),
        (False, "<think></think>yes", "", "yes"),
        (True, "hm\n</think>\nyes\n", "hm", "yes\n"),
        (True, "cut off </thin", "cut off </thin", ""),
        (False, "<thin", "", "<thin"),
    ],
)
def test_reasoning_is_what_stands_between_the_tags_at_the_beginning(is_open, text, thought, shown):
    pieces = read(ThinkParser(is_open), text)
    assert "".join(piece.text for piece in pieces if piece.kind == "reasoning") == thought
    assert content(pieces) == shown


def test_calls_are_looked_for_behind_the_reasoning_only():
    call = '<tool_call>{"name": "f"}</tool_call>'
    pieces = read(AnswerParser(ThinkParser(True), HermesParser(NAMES)), f"I could {call}</think>{call}")
    assert [piece.kind for piece in pieces] == ["reasoning", "call", "arguments"]


def test_every_format_has_a_name_of_its_own():
    assert {name: one.name for name, one in FORMATS.items()} == {name: name for name in FORMATS}
