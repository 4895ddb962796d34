"""Answering a request for text: parse, submit, then the whole answer or a stream of chunks."""

from __future__ import annotations

import logging
from collections.abc import Callable

from aiohttp import web

from jaxserve.server import openai, sse
from jaxserve.server.bridge import Stream
from jaxserve.server.compiling import with_grammar
from jaxserve.server.errors import EngineFailure, error_json, failure_of
from jaxserve.server.exchange import opened, sound_events, whole
from jaxserve.server.openai import Generation
from jaxserve.server.reading import understand
from jaxserve.server.render import Renderer, renderer
from jaxserve.server.served import ServedModel
from jaxserve.types import Event

logger = logging.getLogger(__name__)

Parse = Callable[[object, ServedModel, float], Generation]


async def completions(request: web.Request) -> web.StreamResponse:
    return await _answer(request, openai.parse_completion)


async def chat_completions(request: web.Request) -> web.StreamResponse:
    return await _answer(request, openai.parse_chat)


async def _answer(request: web.Request, parse: Parse) -> web.StreamResponse:
    async def understood(model: ServedModel, arrival_s: float) -> Generation:
        generation = await understand(request, lambda body: parse(body, model, arrival_s))
        return await with_grammar(generation, model)

    async with opened(request, understood) as (generation, stream):
        if generation.stream:
            return await _stream(request, generation, stream)
        return await whole(generation.id, stream, renderer(generation))


async def _stream(request: web.Request, generation: Generation, stream: Stream) -> web.StreamResponse:
    """Chunks as they come. What fails before the first event is a status, what fails later a chunk."""
    events = await sound_events(stream)
    response = web.StreamResponse(headers=sse.headers(generation.id))
    try:
        await response.prepare(request)
        await _write_chunks(response, renderer(generation), generation.include_usage, events, stream)
        await response.write_eof()
    except ConnectionError:  # the client left while we wrote: leaving `stream` aborts the rest
        logger.debug("client of %s left (499)", generation.id)
    except Exception:
        logger.exception("unhandled error in the stream of %s", generation.id)
        await response.write(sse.frame([error_json(EngineFailure())]) + sse.DONE)
    return response


async def _write_chunks(
    response: web.StreamResponse,
    answer: Renderer,
    include_usage: bool,
    events: list[tuple[int, Event]],
    stream: Stream,
) -> None:
    while True:
        chunks: list[str] = []
        for index, event in events:
            if (failure := failure_of(event)) is not None:
                chunks.append(error_json(failure))
                await response.write(sse.frame(chunks) + sse.DONE)
                return
            chunks += answer.chunks(index, event)
        if stream.ended:
            if include_usage:
                chunks.append(answer.usage_chunk())
            await response.write(sse.frame(chunks) + sse.DONE)
            return
        if chunks:
            await response.write(sse.frame(chunks))
        events = await stream.next()
