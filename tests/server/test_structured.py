"""Structured output over HTTP: a whole server, over a fake device that picks at random from what it may."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jsonschema
import pytest

from jaxserve.engine.config import EngineConfig
from jaxserve.errors import RequestError
from jaxserve.server.openai import parse_chat, parse_completion
from tests.fakes import FakeModel
from tests.server.running import RunningServer, served_model

CONFIG = EngineConfig(max_model_len=512, num_pages=513, page_size=4, max_num_seqs=4, max_num_queued=64)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "warm": {"type": "boolean"}},
    "required": ["city", "warm"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "weather", "schema": SCHEMA, "strict": True}}
MESSAGES = [{"role": "user", "content": "x"}]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(config=CONFIG, fake_model=FakeModel(eos_every=5)) as running:
        yield running


def ask(server: RunningServer, stream: bool = False, **fields: Any) -> tuple[list[str], list[str]]:
    """(text, finish_reason) of each choice of a chat."""
    body = {"messages": MESSAGES, "max_tokens": 300, **fields}
    if not stream:
        status, answer = server.post("/v1/chat/completions", body)
        assert status == 200, answer
        choices = answer["choices"]
        return [c["message"]["content"] for c in choices], [c["finish_reason"] for c in choices]
    num = fields.get("n", 1)
    texts, reasons = [""] * num, [""] * num
    for event in server.stream("/v1/chat/completions", body)[:-1]:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
            reasons[choice["index"]] = choice["finish_reason"] or reasons[choice["index"]]
    return texts, reasons


def check(text: str, reason: str) -> None:
    if reason == "stop":
        jsonschema.validate(json.loads(text), SCHEMA)
    else:
        assert reason == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("temperature", [0, 1])
def test_a_chat_answer_follows_its_json_schema_whole_streamed_and_n_times(server, stream, temperature):
    texts, reasons = ask(server, stream, response_format=FORMAT, temperature=temperature, n=3)
    for text, reason in zip(texts, reasons):
        check(text, reason)
    assert "stop" in reasons


@pytest.mark.parametrize("names", [("structured_outputs", "{}"), ("guided", "guided_{}")])
@pytest.mark.parametrize(
    ("key", "value", "matches"),
    [
        ("json", SCHEMA, None),
        ("json", json.dumps(SCHEMA), None),
        ("regex", "[ab]{2,5}", r"[ab]{2,5}"),
        ("choice", ["yes", "no, never"], r"yes|no, never"),
        ("grammar", 'root ::= "a" ("b" | "c")', r"a[bc]"),
    ],
)
def test_every_kind_of_constraint_works_under_both_names_in_completions(server, names, key, value, matches):
    field, pattern = names
    fields = {pattern.format(key): value}
    body = {"prompt": ["x", "y"], "max_tokens": 300, "seed": 4}
    body |= {field: fields} if field == "structured_outputs" else fields
    status, answer = server.post("/v1/completions", body)
    assert status == 200, answer
    for choice in answer["choices"]:
        if matches is None:
            check(choice["text"], choice["finish_reason"])
        else:
            assert re.fullmatch(matches, choice["text"])
            assert choice["finish_reason"] == "stop"


def test_an_answer_that_is_cut_says_length_and_one_that_is_not_parses(server):
    texts, reasons = ask(server, response_format=FORMAT, max_tokens=4)
    assert reasons == ["length"]
    with pytest.raises(json.JSONDecodeError):
        json.loads(texts[0])


def test_any_json_object_is_asked_for_by_json_object(server):
    for seed in range(3):
        [text], [reason] = ask(server, response_format={"type": "json_object"}, seed=seed, max_tokens=60)
        assert text.startswith("{")
        if reason == "stop":
            assert isinstance(json.loads(text), dict)


def test_a_stop_string_ends_a_constrained_answer_too(server):
    [text], [reason] = ask(server, structured_outputs={"regex": "[ab]{40}c"}, stop="ab")
    assert reason == "stop"
    assert re.fullmatch("b*a*", text)


def test_neighbours_without_a_grammar_answer_as_they_do_alone(server):
    alone = ask(server, seed=7, max_tokens=40)
    body = {"messages": MESSAGES, "max_tokens": 40, "seed": 7}
    with ThreadPoolExecutor(4) as pool:
        held = [pool.submit(ask, server, response_format=FORMAT, seed=n) for n in range(2)]
        free = [pool.submit(server.post, "/v1/chat/completions", body) for _ in range(2)]
        for future in free:
            choice = future.result()[1]["choices"][0]
            assert choice["message"]["content"] == alone[0][0]
        for future in held:
            [text], [reason] = future.result()
            check(text, reason)


@pytest.mark.parametrize(
    ("fields", "param", "reason"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nix"}}}},
         "response_format.json_schema.schema", "nix"),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs.regex", "unclosed group"),
        ({"structured_outputs": {"json": {"type": "object", "unevaluatedProperties": False}}},
         "structured_outputs.json", "unevaluatedProperties"),
        ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs.grammar", "nowhere"),
    ],
)  # fmt: skip
def test_an_invalid_schema_or_regex_is_a_400_that_quotes_the_reason_and_the_server_goes_on(
    server, fields, param, reason
):
    status, answer = server.post("/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 5, **fields})
    assert status == 400
    assert answer["error"]["param"] == param
    assert answer["error"]["code"] == "invalid_grammar"
    assert reason in answer["error"]["message"]
    assert ask(server, max_tokens=3)
    server.wait_idle()


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": "json"}, "response_format"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": 5}}, "structured_outputs.json"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"response_format": {"type": "json_object"}, "guided_regex": "a"}, "guided_regex"),
        ({"guided_choice": ["a", 1]}, "guided_choice[1]"),
        ({"guided_regex": "a", "allowed_token_ids": [4]}, "allowed_token_ids"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(fields, param):
    for parse, body in ((parse_chat, {"messages": MESSAGES}), (parse_completion, {"prompt": "x"})):
        with pytest.raises(RequestError) as caught:
            parse({**body, **fields}, served_model(), 0.0)
        assert caught.value.param == param


def test_fields_that_ask_for_nothing_cost_nothing():
    fields = {"response_format": {"type": "text"}, "structured_outputs": {}, "guided_json": None}
    assert parse_completion({"prompt": "x", **fields}, served_model(), 0.0).grammar is None
    assert parse_chat({"messages": MESSAGES, **fields}, served_model(), 0.0).grammar is None
