"""/v1/responses: a chat in OpenAI's newer shape. Nothing is stored."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from aiohttp import web

from jaxserve.errors import RequestError
from jaxserve.server import sse
from jaxserve.server.bridge import Stream
from jaxserve.server.compiling import with_grammar
from jaxserve.server.errors import EngineFailure, failure_of
from jaxserve.server.reading import understand
from jaxserve.server.response_render import ResponseRenderer
from jaxserve.server.responses import Asked, parse_responses, renamed
from jaxserve.server.state import STATE

logger = logging.getLogger(__name__)


async def responses(request: web.Request) -> web.StreamResponse:
    arrival_s = time.monotonic()
    state = request.app[STATE]
    serving = state.serving()
    try:
        asked = await understand(request, lambda body: parse_responses(body, serving.model, arrival_s))
        try:
            generation = await with_grammar(asked.generation, serving.model)
        except RequestError as error:
            raise renamed(error) from error
        asked = replace(asked, generation=generation)
        stream = state.bridge.open(state.serving().engine, generation.requests)
    except RequestError as error:
        serving.metrics.reject(error.code)
        raise
    try:
        with stream:
            if generation.stream:
                return await _stream(request, asked, stream)
            return await _whole(asked, stream)
    except asyncio.CancelledError:
        logger.debug("client of %s left (499)", generation.id)
        raise


async def _whole(asked: Asked, stream: Stream) -> web.Response:
    answer = ResponseRenderer(asked)
    while events := await stream.next():
        for _, event in events:
            if (failure := failure_of(event)) is not None:
                raise failure
            answer.events(event)
    headers = {"X-Request-Id": asked.generation.id}
    return web.Response(text=answer.response(), content_type="application/json", headers=headers)


async def _stream(request: web.Request, asked: Asked, stream: Stream) -> web.StreamResponse:
    """Events as they come. A failure before the first one is a status, a later one `response.failed`."""
    events = await stream.next()
    for _, event in events:
        if (failure := failure_of(event)) is not None:
            raise failure
    response = web.StreamResponse(headers=sse.headers(asked.generation.id))
    answer = ResponseRenderer(asked)
    try:
        await response.prepare(request)
        text = answer.begin()
        while events:
            for _, event in events:
                failure = failure_of(event)
                text += answer.events(event) if failure is None else answer.failed(failure)
            if text:
                await response.write(text.encode())
            text, events = "", await stream.next()
        await response.write_eof()
    except ConnectionError:  # the client left while we wrote: leaving `stream` aborts the rest
        logger.debug("client of %s left (499)", asked.generation.id)
    except Exception:
        logger.exception("unhandled error in the stream of %s", asked.generation.id)
        await response.write(answer.failed(EngineFailure()).encode())
    return response
