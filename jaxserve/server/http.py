"""What the HTTP layer itself needs: bounds on bodies, headers and patience, and JSON for broken HTTP."""

from __future__ import annotations

import asyncio
import logging

from aiohttp import web
from aiohttp.abc import AbstractAccessLogger

from jaxserve.server.errors import HttpError, body_too_large, error_json, error_response, internal_error

logger = logging.getLogger(__name__)

BODY_TIMEOUT_S = 60.0  # for a whole body to come in
KEEPALIVE_TIMEOUT_S = 75.0  # for the next request to begin
HEADER_TIMEOUT_S = 20.0  # for all of a request's headers to come in, from their first byte
SEND_TIMEOUT_S = 60.0  # for a client to take some of an answer that waits for it
MAX_HEADERS = 100
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
    """One client connection. aiohttp answers broken HTTP with plain text; here that is JSON too.

    Two clocks run beside aiohttp's own for idle connections: one while headers come in, one while bytes
    of an answer wait for the client to read. One that is too slow loses its connection, and what it
    asked for is aborted.
    """

    _headers_due: asyncio.TimerHandle | None = None
    _reading_due: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        # pause_writing tells of whatever can't be sent at once. Not 0: TLS transports pause at the limit,
        # plain ones above it, so with 0 TLS would pause with nothing to send, and nothing would resume it.
        transport.set_write_buffer_limits(high=1, low=0)
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        waiting = self._waiter is not None and not self._waiter.done()  # for a request to be complete
        if waiting and self._headers_due is None:
            self._headers_due = self._loop.call_later(HEADER_TIMEOUT_S, self._give_up_headers)
        elif not waiting and self._headers_due is not None:
            self._headers_due.cancel()
            self._headers_due = None

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reading(self.transport)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop(self._reading_due)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._stop(self._headers_due)
        self._stop(self._reading_due)
        super().connection_lost(exc)

    @staticmethod
    def _stop(timer: asyncio.TimerHandle | None) -> None:
        if timer is not None:
            timer.cancel()

    def _give_up_headers(self) -> None:
        if self.transport is not None:
            text = f"The headers did not arrive within {HEADER_TIMEOUT_S:g} seconds."
            body = error_json(HttpError(408, text)).encode()
            self.transport.write(
                b"HTTP/1.1 408 Request Timeout\r\nContent-Type: application/json; charset=utf-8\r\n"
                b"Connection: close\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)
            )
        self.force_close()

    def _watch_reading(self, transport: asyncio.Transport | None) -> None:
        if transport is not None:
            size = transport.get_write_buffer_size()
            self._reading_due = self._loop.call_later(SEND_TIMEOUT_S, self._look_at_reading, transport, size)

    def _look_at_reading(self, transport: asyncio.Transport, size_before: int) -> None:
        if transport.get_write_buffer_size() < size_before:
            self._watch_reading(transport)
            return
        logger.info("a client has not read its answer for %g s; its connection is closed", SEND_TIMEOUT_S)
        transport.abort()

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
            # Not `exc` itself: it quotes the header, which may hold a key.
            logger.debug("broken HTTP from %s: %s", request.remote, type(exc).__name__)
            reason = (message or "malformed request").partition("\n")[0].rstrip(".: ")
            response = error_response(HttpError(status, f"This is not valid HTTP: {reason}."))
        response.force_close()
        return response


class AccessLogger(AbstractAccessLogger):
    """One line a request: who, what, status, bytes, seconds. No query and no header: they may hold keys."""

    def log(self, request: web.BaseRequest, response: web.StreamResponse, time: float) -> None:
        self.logger.info(
            "%s %s %r %d, %d bytes, %.3f s",
            request.remote, request.method, request.path, response.status, response.body_length, time,
        )  # fmt: skip


def connection_factory(
    server: web.Server, loop: asyncio.AbstractEventLoop, *, access_log: bool, max_header_bytes: int
) -> Connection:
    """A protocol for one new connection, with our limits; `max_header_bytes` is for one line of the head."""
    log = logging.getLogger("jaxserve.access") if access_log else None
    return Connection(
        server,
        loop=loop,
        keepalive_timeout=KEEPALIVE_TIMEOUT_S,
        lingering_time=LINGER_S,
        access_log=log,  # type: ignore[arg-type]  # None is how it is switched off
        access_log_class=AccessLogger,
        max_line_size=max_header_bytes,
        max_field_size=max_header_bytes,
        max_headers=MAX_HEADERS,
    )
