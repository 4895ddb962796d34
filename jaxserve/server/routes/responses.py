"""/v1/responses: a chat in OpenAI's newer shape. Nothing is stored."""

from __future__ import annotations

import logging
from dataclasses import replace

from aiohttp import web

from jaxserve.errors import RequestError
from jaxserve.server import sse
from jaxserve.server.bridge import Stream
from jaxserve.server.compiling import with_grammar
from jaxserve.server.errors import EngineFailure, failure_of
from jaxserve.server.exchange import opened, sound_events, whole
from jaxserve.server.reading import understand
from jaxserve.server.response_render import ResponseRenderer
from jaxserve.server.responses import Asked, parse_responses, renamed
from jaxserve.server.served import ServedModel

logger = logging.getLogger(__name__)


async def responses(request: web.Request) -> web.StreamResponse:
    async def understood(model: ServedModel, arrival_s: float) -> Asked:
        asked = await understand(request, lambda body: parse_responses(body, model, arrival_s))
        try:
            return replace(asked, generation=await with_grammar(asked.generation, model))
        except RequestError as error:
            raise renamed(error) from error

    async with opened(request, understood) as (asked, stream):
        if asked.generation.stream:
            return await _stream(request, asked, stream)
        return await whole(asked.id, stream, ResponseRenderer(asked))


async def _stream(request: web.Request, asked: Asked, stream: Stream) -> web.StreamResponse:
    """Events as they come. A failure before the first one is a status, a later one `response.failed`."""
    events = await sound_events(stream)
    response = web.StreamResponse(headers=sse.headers(asked.id))
    answer = ResponseRenderer(asked)
    try:
        await response.prepare(request)
        text = answer.begin()
        while events:
            for index, event in events:
                failure = failure_of(event)
                text += answer.collect(index, event) if failure is None else answer.failed(failure)
            if text:
                await response.write(text.encode())
            text, events = "", await stream.next()
        await response.write_eof()
    except ConnectionError:  # the client left while we wrote: leaving `stream` aborts the rest
        logger.debug("client of %s left (499)", asked.id)
    except Exception:
        logger.exception("unhandled error in the stream of %s", asked.id)
        await response.write(answer.failed(EngineFailure()).encode())
    return response
