"""From an HTTP request to what it asks for, without holding up the streams of others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any

from aiohttp import web

from jaxserve.server import openai
from jaxserve.server.http import read_json_body
from jaxserve.server.state import STATE, ServerState

# A body up to this size is parsed and tokenised at once, in about a millisecond; a longer one in a thread.
INLINE_BYTES = 4096
# With these a small body can ask for long work too: they feed templates and grammars. What such work may
# cost is bounded where it is done (tokenizer/sandbox.py for templates).
COSTLY_FIELDS = frozenset(
    ("chat_template", "chat_template_kwargs", "documents", "response_format", "structured_outputs",
     "text", "tools")
)  # fmt: skip


async def understand[T](request: web.Request, parse: Callable[[object], T]) -> T:
    """`parse` of the JSON in the body. Raises HttpError, and the RequestErrors of `parse`."""
    state = request.app[STATE]
    raw = await read_json_body(request)

    def in_full() -> T:
        return parse(_loads(raw, request, state))

    in_thread = partial(asyncio.get_running_loop().run_in_executor, state.parsers)
    if len(raw) > INLINE_BYTES:
        return await in_thread(in_full)
    body = _loads(raw, request, state)
    if isinstance(body, dict) and not COSTLY_FIELDS.isdisjoint(body):
        return await in_thread(parse, body)
    return parse(body)


def _loads(raw: bytes, request: web.Request, state: ServerState) -> Any:
    body = openai.loads(raw)
    state.log_request(request.method, request.path, body)
    return body
