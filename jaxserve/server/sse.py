"""Server-sent events: how chunks stand on the wire. Source: WHATWG HTML, section 9.2."""

from __future__ import annotations

from collections.abc import Iterable

CONTENT_TYPE = "text/event-stream; charset=utf-8"
DONE = b"data: [DONE]\n\n"


def frame(chunks: Iterable[str]) -> bytes:
    """The bytes of several events, one for each JSON text; a JSON text holds no line break."""
    return "".join([f"data: {chunk}\n\n" for chunk in chunks]).encode()


def headers(request_id: str) -> dict[str, str]:
    """Of a stream's answer."""
    return {
        "Content-Type": CONTENT_TYPE,
        "Cache-Control": "no-cache",
        "X-Accel-Buffering": "no",  # proxies must pass each chunk on
        "X-Request-Id": request_id,
    }
