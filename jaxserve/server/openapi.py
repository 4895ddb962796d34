"""The OpenAPI document of all routes, from the pydantic models. Source: OpenAPI Specification 3.1.0."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

import jaxserve
from jaxserve.server.schema import REFUSED_CHAT, REFUSED_COMPLETION, ChatBody, CompletionBody, answers
from jaxserve.server.schema.body import Body
from jaxserve.server.schema.embeddings import REFUSED_EMBEDDINGS, EmbeddingsBody
from jaxserve.server.schema.responses import REFUSED_RESPONSES, ResponsesBody
from jaxserve.server.schema.tokens import DetokenizeBody, TokenizeBody

_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum", "lt": "exclusiveMaximum"}
_REF = "#/components/schemas/{model}"
_ERRORS = {
    400: "The request can't be served as it is; the error names field, value and limit.",
    401: "The API key is missing or wrong.",
    404: "There is no such model.",
    408: "The body did not arrive in time.",
    413: "The body is longer than the limit.",
    415: "The body is not JSON.",
    417: "Only 'Expect: 100-continue' is understood.",
    429: "The queue is full, or the API key has too many requests under way; see Retry-After.",
    500: "The server failed while it answered; its log says why.",
    503: "The server is starting, shutting down or broken; see Retry-After.",
    504: "The request's timeout, or the server's limit of waiting, has passed.",
}
_OPEN_ERRORS: tuple[int, ...] = (503,)
_GET_ERRORS = (401, 503)
_TEXT_ERRORS = (400, 401, 404, 408, 413, 415, 417, 429, 503)  # of a POST that needs no engine
_ENGINE_ERRORS = (*_TEXT_ERRORS, 500, 504)


@dataclass(frozen=True, slots=True)
class Route:
    method: str
    path: str
    summary: str
    answer: type[BaseModel] | None  # None: an empty one, or text
    errors: tuple[int, ...]
    body: type[Body] | None = None
    refused: Mapping[str, tuple[Any, ...]] | None = None  # fields known but not supported
    streams: bool = False
    has_short: bool = True  # answers without /v1 too
    is_open: bool = False  # needs no API key


ROUTES = (
    Route("post", "/v1/completions", "Continue prompts.", answers.CompletionAnswer, _ENGINE_ERRORS,
          CompletionBody, REFUSED_COMPLETION, streams=True),
    Route("post", "/v1/chat/completions", "Answer a chat.", answers.ChatAnswer, _ENGINE_ERRORS,
          ChatBody, REFUSED_CHAT, streams=True),
    Route("post", "/v1/responses", "Answer a chat, in the newer shape.", answers.ResponsesAnswer,
          _ENGINE_ERRORS, ResponsesBody, REFUSED_RESPONSES, streams=True),
    Route("post", "/v1/embeddings", "Texts as vectors.", answers.EmbeddingsAnswer, _ENGINE_ERRORS,
          EmbeddingsBody, REFUSED_EMBEDDINGS),
    Route("post", "/v1/tokenize", "The ids of a text or a chat.", answers.TokenizeAnswer, _TEXT_ERRORS,
          TokenizeBody),
    Route("post", "/v1/detokenize", "The text of ids.", answers.DetokenizeAnswer, _TEXT_ERRORS,
          DetokenizeBody),
    Route("get", "/v1/tokenizer_info", "What the tokenizer is.", answers.TokenizerInfoAnswer, _GET_ERRORS),
    Route("get", "/v1/models", "The models served.", answers.ModelList, _GET_ERRORS),
    Route("get", "/v1/models/{name}", "One model.", answers.ModelCard, (*_GET_ERRORS, 404)),
    Route("get", "/health", "Whether requests are taken.", None, _OPEN_ERRORS, has_short=False, is_open=True),
    Route("get", "/metrics", "Prometheus metrics.", None, _OPEN_ERRORS, has_short=False, is_open=True),
    Route("get", "/load", "How busy the engine is.", answers.LoadAnswer, _OPEN_ERRORS, has_short=False,
          is_open=True),
    Route("get", "/version", "The version of the server.", answers.VersionAnswer, (), has_short=False,
          is_open=True),
)  # fmt: skip


@cache
def openapi_text() -> str:
    return json.dumps(document())


def document() -> dict[str, Any]:
    """The whole document. Every path stands there with /v1 and without, as the server has it."""
    bodies = {route.body: route.refused or {} for route in ROUTES if route.body is not None}
    shapes = {route.answer for route in ROUTES if route.answer is not None} | {answers.ErrorAnswer}
    _, found = models_json_schema(
        [*((body, "validation") for body in bodies), *((shape, "validation") for shape in shapes)],
        ref_template=_REF,
    )
    schemas = found["$defs"]
    for schema in schemas.values():
        _spell_bounds(schema)
        _allow_null(schema)
    for body, refused in bodies.items():
        _add_refused(schemas[body.__name__], refused)
    paths: dict[str, Any] = {}
    for route in ROUTES:
        shorts = (route.path, route.path.removeprefix("/v1")) if route.has_short else (route.path,)
        for path in shorts:
            paths[path] = {route.method: _operation(route, path)}
    return {
        "openapi": "3.1.0",
        "info": {"title": "jaxserve", "version": jaxserve.__version__},
        "paths": paths,
        "components": {
            "schemas": schemas,
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, path: str) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route.answer is not None:
        content["application/json"] = {"schema": _ref(route.answer)}
    if route.streams:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    good: dict[str, Any] = {"description": "The answer."}
    answered: dict[str, Any] = {"200": good | ({"content": content} if content else {})}
    for status in route.errors:
        schema = {"application/json": {"schema": _ref(answers.ErrorAnswer)}}
        answered[str(status)] = {"description": _ERRORS[status], "content": schema}
    operation: dict[str, Any] = {
        "operationId": f"{route.method}{path.translate(str.maketrans('/{}', '___'))}",
        "summary": route.summary,
        "responses": answered,
        "security": [] if route.is_open else [{"key": []}, {}],  # keys are asked for where some are set
    }
    if "{name}" in path:
        named = {"name": "name", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        operation["parameters"] = [named]
    if route.body is not None:
        body = {"application/json": {"schema": _ref(route.body)}}
        operation["requestBody"] = {"required": True, "content": body}
    return operation


def _ref(model: type[BaseModel]) -> dict[str, str]:
    return {"$ref": _REF.format(model=model.__name__)}


def _spell_bounds(schema: object) -> None:
    """pydantic leaves bounds behind a validator in its own words."""
    if isinstance(schema, list):
        for item in schema:
            _spell_bounds(item)
    elif isinstance(schema, dict):
        if "type" in schema:
            for name in _BOUNDS.keys() & schema.keys():
                schema[_BOUNDS[name]] = schema.pop(name)
        for item in schema.values():
            _spell_bounds(item)


def _allow_null(schema: dict[str, Any]) -> None:
    """A field that may be left out may be null too, which stands for its default."""
    required = schema.get("required", ())
    for name, field in schema.get("properties", {}).items():
        options = field.get("anyOf", ())
        is_free = field.keys() <= {"title", "default", "description"}
        if name in required or is_free or {"type": "null"} in options:
            continue
        kept = {key: field.pop(key) for key in ("title", "description", "default") if key in field}
        inner = dict(field)
        field.clear()
        field |= {**kept, "anyOf": [*(options or [inner]), {"type": "null"}]}


def _add_refused(schema: dict[str, Any], refused: Mapping[str, tuple[Any, ...]]) -> None:
    for name, neutral in refused.items():
        schema["properties"][name] = {
            "description": "Not supported: may only ask for nothing.", "enum": [*neutral, None]
        }
