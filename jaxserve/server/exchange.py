"""What every route that asks the engine does: take the request in, open its stream, and answer whole."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from aiohttp import web

from jaxserve.errors import RequestError
from jaxserve.server.bridge import Stream
from jaxserve.server.errors import failure_of
from jaxserve.server.security import count_answers
from jaxserve.server.served import ServedModel
from jaxserve.server.state import STATE
from jaxserve.types import Event, Request

logger = logging.getLogger(__name__)


class Asked(Protocol):
    """An HTTP request, understood."""

    @property
    def id(self) -> str: ...

    @property
    def requests(self) -> Sequence[Request]: ...


class Collector(Protocol):
    """What makes one answer of the events of all requests."""

    def collect(self, index: int, event: Event) -> object: ...

    def response(self) -> str: ...


@asynccontextmanager
async def opened[T: Asked](
    request: web.Request, understand: Callable[[ServedModel, float], Awaitable[T]]
) -> AsyncIterator[tuple[T, Stream]]:
    """What `understand(model, arrival_s)` makes of the request, and the stream of its events.

    Leaving it aborts what has not ended. Raises RequestError, and counts it, when the request is refused.
    """
    arrival_s = time.monotonic()
    state = request.app[STATE]
    serving = state.serving()
    try:
        asked = await understand(serving.model, arrival_s)
        count_answers(request, len(asked.requests))
        stream = state.bridge.open(state.serving().engine, asked.requests)
    except RequestError as error:
        serving.metrics.reject(error.code)
        raise
    try:
        with stream:
            yield asked, stream
    except asyncio.CancelledError:
        logger.debug("client of %s left (499)", asked.id)
        raise


async def sound_events(stream: Stream) -> list[tuple[int, Event]]:
    """The next events. A failure among them is raised, for an answer that has not begun: it is its status."""
    events = await stream.next()
    for _, event in events:
        if (failure := failure_of(event)) is not None:
            raise failure
    return events


async def whole(request_id: str, stream: Stream, answer: Collector) -> web.Response:
    """The answer when all has ended, or the first failure."""
    while events := await sound_events(stream):
        for index, event in events:
            answer.collect(index, event)
    headers = {"X-Request-Id": request_id}
    return web.Response(text=answer.response(), content_type="application/json", headers=headers)
