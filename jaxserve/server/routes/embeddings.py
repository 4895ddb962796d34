"""/v1/embeddings: texts as vectors."""

from __future__ import annotations

from aiohttp import web

from jaxserve.server.embeddings import Embeddings, EmbeddingsRenderer, parse_embeddings
from jaxserve.server.exchange import opened, whole
from jaxserve.server.reading import understand
from jaxserve.server.served import ServedModel


async def embeddings(request: web.Request) -> web.Response:
    async def understood(model: ServedModel, arrival_s: float) -> Embeddings:
        return await understand(request, lambda body: parse_embeddings(body, model, arrival_s))

    async with opened(request, understood) as (asked, stream):
        return await whole(asked.id, stream, EmbeddingsRenderer(asked))
