"""Every error as OpenAI's JSON, with the status and headers that go with it; never a traceback."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable

from aiohttp import web

from jaxserve.errors import RequestError
from jaxserve.types import Event

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_CODES = {
    404: "not_found",
    405: "method_not_allowed",
    408: "request_timeout",
    413: "request_too_large",
    415: "unsupported_media_type",
    417: "expectation_failed",
}


class HttpError(RequestError):
    """An error of the HTTP layer: anything that has a status of its own."""

    def __init__(self, status: int, message: str):
        super().__init__(message, code=_CODES.get(status))
        self.status = status


class Unauthorized(RequestError):
    """The request came without a valid API key."""

    status = 401

    def __init__(self, message: str):
        super().__init__(message, code="invalid_api_key")


class TooManyRequests(RequestError):
    """The API key has as many requests under way as it may have."""

    status = 429
    type = "rate_limit_error"
    retry_after_s = 1

    def __init__(self, message: str):
        super().__init__(message, code="too_many_requests")


class EngineFailure(RequestError):
    """The engine broke while it answered. The client learns that, the log learns why."""

    status = 500
    type = "server_error"

    def __init__(self) -> None:
        super().__init__("The server failed while it answered this request; its log says why.", code="failed")


class Interrupted(RequestError):
    """The server stops and cut the answer off."""

    status = 503
    type = "service_unavailable"
    retry_after_s = 5

    def __init__(self) -> None:
        super().__init__("The server is shutting down and could not finish this answer.", code="unavailable")


class GrammarTooCostly(RequestError):
    """The answer had to be given up for the work that its grammar takes."""

    def __init__(self, reason: str):
        super().__init__(
            f"The answer can't go on, for its grammar is too costly: {reason}. Make the schema, regular "
            "expression or grammar that it must follow simpler, or less ambiguous.",
            code="grammar_too_costly",
        )


class TimedOut(RequestError):
    """The request's own timeout, or the server's limit of waiting, has passed."""

    status = 504
    type = "timeout"

    def __init__(self, message: str):
        super().__init__(message, code="timeout")


def body_too_large(request: web.BaseRequest) -> HttpError:
    limit = request.client_max_size
    return HttpError(413, f"The request body is larger than the limit of {limit} bytes (--max-body-size).")


def failure_of(event: Event) -> RequestError | None:
    """The error that `event` stands for, if it is not an answer."""
    if event.finish_reason == "error":
        logger.error("request %s failed: %s", event.request_id, event.error)
        return EngineFailure()
    if event.finish_reason == "abort":
        return Interrupted()
    if event.finish_reason == "grammar":
        return GrammarTooCostly((event.error or "").rstrip("."))
    if event.finish_reason == "timeout":
        return TimedOut(f"{(event.error or 'the time is up').capitalize()}.")
    return None


def error_json(error: RequestError) -> str:
    """{"error": {"message", "type", "param", "code"}}"""
    return json.dumps(
        {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}
    )


def error_response(error: RequestError) -> web.Response:
    """The answer to a request that fails with `error`; Retry-After where waiting helps."""
    retry_after_s = getattr(error, "retry_after_s", None)
    headers = {} if retry_after_s is None else {"Retry-After": str(retry_after_s)}
    if error.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(
        status=error.status, text=error_json(error), content_type="application/json", headers=headers
    )


def internal_error() -> web.Response:
    error = RequestError("Internal server error; the server's log says more.", code="internal_error")
    error.status, error.type = 500, "server_error"
    return error_response(error)


@web.middleware
async def json_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns what a handler raises into an answer. A client that left is not an error."""
    try:
        return await handler(request)
    except RequestError as error:
        return error_response(error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        response = error_response(HttpError(error.status, _explain(request, error)))
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response
    except ConnectionError:
        raise
    except Exception:
        logger.exception("unhandled error in %s %s", request.method, request.path)
        return internal_error()


def _explain(request: web.Request, error: web.HTTPException) -> str:
    what = f"{request.method} {request.path[:200]}"
    if error.status == 404:
        return f"There is no {what}; see /v1/models, /v1/completions and /v1/chat/completions."
    if error.status == 405:
        return f"{what} is not possible; use {error.headers.get('Allow', 'another method')}."
    if error.status == 413:
        return body_too_large(request).message
    return f"{error.reason}: {what}."
