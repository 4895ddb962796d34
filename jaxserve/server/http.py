"""What the HTTP layer itself needs: bounded bodies, and JSON for requests that are not even HTTP."""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web

from jaxserve.server.errors import HttpError, body_too_large, error_response, internal_error

logger = logging.getLogger(__name__)

BODY_TIMEOUT_S = 60.0  # for a whole body to come in
KEEPALIVE_TIMEOUT_S = 75.0  # for the next request, its headers included
LINGER_S = 5.0  # for the rest of a body that was refused, so that its sender reads the answer


async def read_json_body(request: web.Request) -> bytes:
    """The body of a POST that must be JSON; raises HttpError (400, 408, 413, 415)."""
    kind = request.content_type
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise HttpError(
            415, f"The body must be JSON: send the header 'Content-Type: application/json', not {kind!r}."
        )
    if (request.content_length or 0) > request.client_max_size:
        raise body_too_large(request)
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return await request.read()
    except TimeoutError:
        raise HttpError(408, f"The body did not arrive within {BODY_TIMEOUT_S:g} seconds.") from None
    except web.RequestPayloadError as exc:
        raise HttpError(400, f"The body can't be read: {exc}.") from None


class Connection(web.RequestHandler):
    """One client connection. aiohttp answers broken HTTP with plain text; here that is JSON too."""

    def handle_error(
        self,
        request: web.BaseRequest,
        status: int = 500,
        exc: BaseException | None = None,
        message: str | None = None,
    ) -> web.StreamResponse:
        if request.writer.output_size > 0:
            raise ConnectionError("an answer is under way already")
        if status >= 500:
            logger.error("unhandled error in a connection of %s", request.remote, exc_info=exc)
            response = internal_error()
        else:
            logger.debug("broken HTTP from %s: %s", request.remote, exc)
            reason = (message or "malformed request").partition("\n")[0].rstrip(".: ")
            response = error_response(HttpError(status, f"This is not valid HTTP: {reason}."))
        response.force_close()
        return response


def connection_factory(server: web.Server, loop: asyncio.AbstractEventLoop, access_log: bool) -> Connection:
    """A protocol for one new connection, with our limits."""
    log = logging.getLogger("jaxserve.access") if access_log else None
    return Connection(
        server,
        loop=loop,
        keepalive_timeout=KEEPALIVE_TIMEOUT_S,
        lingering_time=LINGER_S,
        access_log=log,  # type: ignore[arg-type]  # None is how it is switched off
    )
