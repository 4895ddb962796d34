"""The OpenAPI document is valid, complete, and true of the server."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator
from openapi_spec_validator import validate

from jaxserve.engine.config import EngineConfig
from jaxserve.server.openapi import ROUTES, document
from tests.server.running import RunningServer
from tests.server.schemas import nearly, values

SMALL = EngineConfig(max_model_len=48, num_pages=49, page_size=4, max_num_seqs=4, max_num_queued=12)
POSTS = [route for route in ROUTES if route.body is not None]
FEW = settings(
    max_examples=16, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck)
)
PAST = {"minimum": -1, "maximum": 1, "exclusiveMinimum": 0, "exclusiveMaximum": 0}


@pytest.fixture(scope="module")
def small():
    with RunningServer(config=SMALL) as running:
        yield running
        running.wait_idle()


@cache
def spec() -> dict[str, Any]:
    return document()


@cache
def validator(name: str) -> Draft202012Validator:
    return Draft202012Validator({"$ref": f"#/components/schemas/{name}", "components": spec()["components"]})


def check_answer(path: str, method: str, status: int, headers: dict[str, str], raw: bytes) -> None:
    """The answer is one that the document has for this route: its status, its type, its shape."""
    documented = spec()["paths"][path][method]["responses"]
    assert str(status) in documented, f"{method} {path} answered {status}: {raw[:500]!r}"
    assert status < 500, raw
    content = documented[str(status)].get("content")
    if content is None:
        return
    kind = headers["Content-Type"].partition(";")[0]
    assert kind in content
    if kind == "text/event-stream":
        frames = raw.decode().split("\n\n")
        assert frames.pop() == ""
        data = [frame[frame.index("data: ") + 6 :] for frame in frames]
        assert data
        assert all(isinstance(json.loads(text), dict) for text in data if text != "[DONE]")
        return
    name = content[kind]["schema"]["$ref"].rpartition("/")[2]
    validator(name).validate(json.loads(raw))


def test_the_document_is_valid_and_the_server_gives_it_out(small):
    validate(document())
    status, found = small.get("/openapi.json")
    assert status == 200
    assert found == json.loads(json.dumps(document()))


def test_the_document_has_every_route_that_the_server_has(small):
    router = small.server._runner.app.router
    served = {
        (route.resource.canonical, route.method.lower())
        for route in router.routes()
        if route.method != "HEAD" and route.resource.canonical != "/openapi.json"
    }
    told = {(path, method) for path, methods in document()["paths"].items() for method in methods}
    assert told == served


def test_only_what_the_document_says_is_open_without_a_key(small):
    from jaxserve.server.security import OPEN_PATHS

    assert {route.path for route in ROUTES if route.is_open} | {"/openapi.json"} == OPEN_PATHS


@pytest.mark.parametrize("route", [route for route in ROUTES if route.body is None], ids=lambda r: r.path)
def test_what_is_read_has_the_documented_shape(small, route):
    for path in {route.path, route.path.removeprefix("/v1")} if route.has_short else {route.path}:
        for name in ("fake-model", "unknown"):
            check_answer(path, "get", *small.request("GET", path.replace("{name}", name)))


@pytest.mark.parametrize("route", POSTS, ids=lambda route: route.path)
@pytest.mark.parametrize("is_valid", [True, False], ids=["valid", "nearly valid"])
def test_whatever_is_sent_gets_a_documented_answer_and_what_is_invalid_is_refused(small, route, is_valid):
    name = route.body.__name__
    schema = {"$ref": f"#/components/schemas/{name}"}
    strategy = values(schema, spec()) if is_valid else nearly(schema, spec())
    seen: set[int] = set()

    @FEW
    @given(body=strategy)
    def run(body: Any) -> None:
        if is_valid:
            validator(name).validate(body)
            if isinstance(body, dict) and "model" in body:
                body["model"] = "fake-model"
        status, headers, raw = small.request("POST", route.path, body)
        seen.add(status)
        check_answer(route.path, "post", status, headers, raw)
        if not validator(name).is_valid(body):
            assert status in (400, 404), (body, raw)

    run()
    assert 400 in seen or is_valid


@pytest.mark.parametrize("route", POSTS, ids=lambda route: route.path)
def test_a_field_out_of_the_documented_bounds_is_400_that_names_it(small, route):
    schema = spec()["components"]["schemas"][route.body.__name__]
    good = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "input": "x", "tokens": [3]}
    body = {name: good[name] for name in schema["properties"] if name in good}
    if route.path == "/v1/tokenize":
        del body["messages"]
    if route.path == "/v1/responses":
        del body["prompt"]
    for name, field in schema["properties"].items():
        for option in field.get("anyOf", [field]):
            for key, past in PAST.items():
                if key in option:
                    bad = {**body, name: option[key] + past}
                    status, answer = small.post(route.path, bad)
                    assert status == 400, bad
                    assert answer["error"]["param"] == name


def test_unknown_paths_and_methods_are_errors_in_json(small):
    @settings(max_examples=30, derandomize=True, deadline=None, database=None)
    @given(path=st.text(st.characters(codec="ascii", categories=["L", "N"]), max_size=8))
    def run(path: str) -> None:
        for method in ("GET", "PUT"):
            status, _, raw = small.request(method, "/v1/" + path)
            assert status in (404, 405)
            assert validator("ErrorAnswer").is_valid(json.loads(raw))

    run()
