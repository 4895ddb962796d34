"""The fields of /v1/responses one by one: each reaches the engine, is a label, or is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.errors import RequestError
from jaxserve.server.responses import parse_responses
from jaxserve.server.schema.responses import REFUSED_RESPONSES
from jaxserve.types import Request
from tests.server.running import served_model

SERVED = served_model()
ASKS_FOR_SOMETHING: dict[str, Any] = {
    "store": True, "previous_response_id": "resp_1", "conversation": "conv_1", "prompt": {"id": "pmpt_1"},
    "background": True, "include": ["reasoning.encrypted_content"], "truncation": "auto",
    "reasoning": {"effort": "low"}, "max_tool_calls": 3, "top_logprobs": 2, "service_tier": "flex",
}  # fmt: skip


def parse(**fields: Any) -> Request:
    [request] = parse_responses({"input": "hello", **fields}, SERVED, 0.0).generation.requests
    return request


@pytest.mark.parametrize("name", REFUSED_RESPONSES)
def test_what_responses_do_not_honour_is_refused_by_name_unless_it_asks_for_nothing(name):
    for value in (None, *REFUSED_RESPONSES[name]):
        parse(**{name: value})
    with pytest.raises(RequestError, match="not supported") as caught:
        parse(**{name: ASKS_FOR_SOMETHING[name]})
    assert caught.value.param == name


def test_fields_of_responses_for_the_engine_itself_reach_it():
    request = parse(priority=-3, timeout=2.5, cache_salt="tenant", max_output_tokens=7, top_k=5, seed=9)
    assert (request.priority, request.timeout_s, request.cache_salt) == (-3, 2.5, "tenant")
    assert (request.params.max_tokens, request.params.top_k, request.params.seed) == (7, 5, 9)


def test_labels_of_responses_change_nothing_and_metadata_is_repeated(server):
    labels = {"user": "u", "safety_identifier": "s", "metadata": {"a": "b"}, "prompt_cache_key": "k"}
    body = {"input": "x", "max_output_tokens": 9, "seed": 2}
    _, plain = server.post("/v1/responses", body)
    _, labelled = server.post("/v1/responses", {**body, **labels})
    texts = [answer["output"][0]["content"][0]["text"] for answer in (plain, labelled)]
    assert texts[0] == texts[1]
    assert (plain["metadata"], labelled["metadata"]) == ({}, {"a": "b"})
