"""The routes."""

from __future__ import annotations

from collections.abc import Sequence

from aiohttp import web

import jaxserve
from jaxserve.errors import RequestError
from jaxserve.server.answer import chat_completions, completions
from jaxserve.server.errors import HttpError, body_too_large, error_response, json_errors
from jaxserve.server.openapi import openapi_text
from jaxserve.server.routes.embeddings import embeddings
from jaxserve.server.routes.responses import responses
from jaxserve.server.routes.tokens import detokenize, tokenize, tokenizer_info
from jaxserve.server.security import KEYS, ORIGINS, Keys, add_cors_headers, check_key, guard
from jaxserve.server.served import ServedModel
from jaxserve.server.state import STATE, ServerState

POSTS = {
    "/completions": completions,
    "/chat/completions": chat_completions,
    "/responses": responses,
    "/embeddings": embeddings,
    "/tokenize": tokenize,
    "/detokenize": detokenize,
}


def make_app(
    state: ServerState, *, max_body_bytes: int, keys: Keys, allowed_origins: Sequence[str]
) -> web.Application:
    """The application around `state`. Every OpenAI route answers with and without /v1."""
    app = web.Application(middlewares=[json_errors, guard], client_max_size=max_body_bytes)
    app[STATE], app[KEYS], app[ORIGINS] = state, keys, frozenset(allowed_origins)
    app.on_response_prepare.append(add_cors_headers)
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", metrics)
    app.router.add_get("/version", version)
    app.router.add_get("/load", load)
    app.router.add_get("/openapi.json", openapi_json)
    for prefix in ("/v1", ""):
        app.router.add_get(f"{prefix}/models", models)
        app.router.add_get(prefix + "/models/{name:.+}", one_model)
        app.router.add_get(f"{prefix}/tokenizer_info", tokenizer_info)
        for path, handler in POSTS.items():
            app.router.add_post(prefix + path, handler, expect_handler=expect)
    return app


async def health(request: web.Request) -> web.Response:
    """200 and nothing while requests are taken, else 503 with the reason."""
    request.app[STATE].serving()
    return web.Response()


async def metrics(request: web.Request) -> web.Response:
    body, content_type = request.app[STATE].loaded().metrics.expose(request.headers.get("Accept", ""))
    return web.Response(body=body, headers={"Content-Type": content_type})


async def version(request: web.Request) -> web.Response:
    return web.json_response({"version": jaxserve.__version__})


async def load(request: web.Request) -> web.Response:
    """How busy the engine is, for balancers; /metrics says more."""
    stats = request.app[STATE].loaded().engine.stats()
    return web.json_response({
        "server_load": stats.num_running + stats.num_waiting,
        "num_requests_running": stats.num_running,
        "num_requests_waiting": stats.num_waiting,
        "kv_cache_usage": stats.num_pages_used / max(1, stats.num_pages_total),
    })


async def openapi_json(request: web.Request) -> web.Response:
    return web.Response(text=openapi_text(), content_type="application/json")


async def models(request: web.Request) -> web.Response:
    model = request.app[STATE].loaded().model
    return web.json_response({"object": "list", "data": [_card(model, name) for name in model.names]})


async def one_model(request: web.Request) -> web.Response:
    model = request.app[STATE].loaded().model
    return web.json_response(_card(model, model.resolve(request.match_info["name"])))


def _card(model: ServedModel, name: str) -> dict[str, object]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "jaxserve",
        "root": model.name,
        "parent": None,
        "max_model_len": model.max_model_len,
        "default_sampling_params": model.generation.shown(),
    }


async def expect(request: web.Request) -> web.StreamResponse | None:
    """Expect: 100-continue, granted only to bodies that will be read."""
    if request.headers.get("Expect", "").lower() != "100-continue":
        return error_response(HttpError(417, "Only 'Expect: 100-continue' is understood."))
    try:
        check_key(request)
    except RequestError as error:
        return error_response(error)
    if (request.content_length or 0) > request.client_max_size:
        return error_response(body_too_large(request))
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # the answer has not begun
    return None
