"""/v1/embeddings: texts as vectors."""

from __future__ import annotations

import asyncio
import logging
import time

from aiohttp import web

from jaxserve.errors import RequestError
from jaxserve.server.bridge import Stream
from jaxserve.server.embeddings import Embeddings, EmbeddingsRenderer, parse_embeddings
from jaxserve.server.errors import failure_of
from jaxserve.server.reading import understand
from jaxserve.server.state import STATE

logger = logging.getLogger(__name__)


async def embeddings(request: web.Request) -> web.Response:
    arrival_s = time.monotonic()
    state = request.app[STATE]
    serving = state.serving()
    try:
        asked = await understand(request, lambda body: parse_embeddings(body, serving.model, arrival_s))
        stream = state.bridge.open(state.serving().engine, asked.requests)
    except RequestError as error:
        serving.metrics.reject(error.code)
        raise
    try:
        with stream:
            return await _answer(asked, stream)
    except asyncio.CancelledError:
        logger.debug("client of %s left (499)", asked.id)
        raise


async def _answer(asked: Embeddings, stream: Stream) -> web.Response:
    """All vectors, or the first failure; leaving `stream` then ends the rest."""
    answer = EmbeddingsRenderer(asked)
    while events := await stream.next():
        for index, event in events:
            if (failure := failure_of(event)) is not None:
                raise failure
            answer.collect(index, event)
    headers = {"X-Request-Id": asked.id}
    return web.Response(text=answer.response(), content_type="application/json", headers=headers)
