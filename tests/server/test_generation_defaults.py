"""The model's own defaults of sampling: for fields that a request leaves out, and for no others."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.server.openai import parse_chat, parse_completion
from jaxserve.server.responses import parse_responses
from jaxserve.tokenizer.generation import GenerationDefaults
from jaxserve.types import SamplingParams
from tests.server.running import RunningServer, served_model

SAMPLING = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
MODEL = served_model(generation=GenerationDefaults(SAMPLING, 33))
PLAIN = served_model()


def completion(served: Any, fields: dict[str, Any]) -> SamplingParams:
    return parse_completion({"prompt": "x", "seed": 1, **fields}, served, 0.0).requests[0].params


def chat(served: Any, fields: dict[str, Any]) -> SamplingParams:
    messages = [{"role": "user", "content": "x"}]
    return parse_chat({"messages": messages, "seed": 1, **fields}, served, 0.0).requests[0].params


def response(served: Any, fields: dict[str, Any]) -> SamplingParams:
    return parse_responses({"input": "x", "seed": 1, **fields}, served, 0.0).requests[0].params


ROUTES = (completion, chat, response)
ASKED = {"temperature": 0.9, "top_p": 0.5, "top_k": 3, "min_p": 0.2, "repetition_penalty": 1.3}
NEUTRAL = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}


@pytest.mark.parametrize("params", ROUTES)
def test_fields_that_are_left_out_or_null_get_the_models_defaults(params):
    for fields in ({}, dict.fromkeys(SAMPLING)):
        found = params(MODEL, fields)
        assert {name: getattr(found, name) for name in SAMPLING} == SAMPLING


@pytest.mark.parametrize("params", ROUTES)
@pytest.mark.parametrize("values", [ASKED, NEUTRAL])
def test_what_a_request_says_wins_field_by_field(params, values):
    for name, value in values.items():
        found = params(MODEL, {name: value})
        assert {other: getattr(found, other) for other in SAMPLING} == {**SAMPLING, name: value}
    assert params(MODEL, {**values, "max_tokens": 9, "max_output_tokens": 9}) == params(
        PLAIN, {**values, "max_tokens": 9, "max_output_tokens": 9}
    )


@pytest.mark.parametrize("params", ROUTES)
def test_without_defaults_of_the_model_they_are_openai_s(params):
    found = params(PLAIN, {})
    assert {name: getattr(found, name) for name in NEUTRAL} == NEUTRAL


def test_a_greedy_model_is_greedy_until_a_request_says_a_temperature():
    greedy = served_model(generation=GenerationDefaults({"temperature": 0.0}))
    for params in ROUTES:
        assert params(greedy, {}).temperature == 0
        assert params(greedy, {"temperature": 1}).temperature == 1


def test_the_longest_answer_by_default_is_of_chats_and_a_completion_keeps_its_16():
    assert chat(MODEL, {}).max_tokens == response(MODEL, {}).max_tokens == 33
    assert completion(MODEL, {}).max_tokens == 16
    assert chat(MODEL, {"max_tokens": 50}).max_tokens == 50
    assert chat(MODEL, {"max_completion_tokens": 50}).max_tokens == 50
    assert response(MODEL, {"max_output_tokens": 50}).max_tokens == 50
    too_long = served_model(generation=GenerationDefaults({}, 10**6))
    assert chat(too_long, {}).max_tokens == chat(PLAIN, {}).max_tokens < PLAIN.max_model_len


def test_defaults_are_told_in_the_list_of_models_and_by_a_response_that_used_them():
    with RunningServer(generation=GenerationDefaults(SAMPLING, 33)) as server:
        for card in server.get("/v1/models")[1]["data"]:
            assert card["default_sampling_params"] == {**SAMPLING, "max_tokens": 33}
        answer = server.post("/v1/responses", {"input": "x", "max_output_tokens": 3})[1]
        assert (answer["temperature"], answer["top_p"]) == (0.6, 0.95)
        answer = server.post("/v1/responses", {"input": "x", "max_output_tokens": 3, "top_p": 1})[1]
        assert (answer["temperature"], answer["top_p"]) == (0.6, 1)


def test_a_model_that_says_nothing_has_no_defaults_in_the_list_of_models(server):
    assert server.get("/v1/models")[1]["data"][0]["default_sampling_params"] == {}
