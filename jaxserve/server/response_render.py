"""From the engine's events to an answer of /v1/responses, whole or as its sequence of events. Pure."""

from __future__ import annotations

import json
import secrets
from functools import partial
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from jaxserve.errors import RequestError
from jaxserve.server.responses import Asked, echoed
from jaxserve.tools.pieces import Piece
from jaxserve.types import Event

compact = partial(json.dumps, separators=(",", ":"))
_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_DELTAS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}


class ResponseRenderer:
    """One answer. Its items, in order: reasoning, messages and calls, each open until the next begins."""

    def __init__(self, asked: Asked):
        generation = asked.generation
        self._asked = asked
        self._reading = generation.reading
        self._parser = None if generation.reading is None else generation.reading.parser()
        self._num_prompt = len(generation.requests[0].prompt_ids)
        self._num_output = self._num_cached = self._num_reasoning = 0
        self._items: list[dict[str, Any]] = []
        self._texts: list[str] = []  # of the open item, or its arguments
        self._open: dict[str, Any] | None = None
        self._sequence = 0
        self._status = "in_progress"
        self._out: list[str] = []  # frames of events that have not been given out

    def begin(self) -> str:
        """The first two events."""
        self._emit("response.created", response=self._response())
        self._emit("response.in_progress", response=self._response())
        return self._take()

    def collect(self, index: int, event: Event) -> str:
        """Take `event` in. Returns the events that tell of it, the end included; there is one answer, 0."""
        self._num_output, self._num_cached = event.num_output_tokens, event.num_cached_tokens
        ended = event.finish_reason is not None
        for piece in self._pieces(event.text, ended):
            self._add(piece)
        if self._open is not None and self._open["type"] == "reasoning":
            self._num_reasoning += len(event.token_ids)
        if ended:
            if not self._items:
                self._begin_item("message")
            self._status = "completed" if event.finish_reason == "stop" else "incomplete"
            self._end_item(self._status)
            self._emit(f"response.{self._status}", response=self._response())
        return self._take()

    def failed(self, error: RequestError) -> str:
        """The event that ends the stream when the answer can't go on."""
        self._status = "failed"
        code = {400: "invalid_prompt", 429: "rate_limit_exceeded"}.get(error.status, "server_error")
        response = {**self._response(), "error": {"code": code, "message": error.message}}
        self._emit("response.failed", response=response)
        return self._take()

    def response(self) -> str:
        """The whole answer."""
        return compact(self._response())

    def _pieces(self, text: str, is_last: bool) -> list[Piece]:
        if self._parser is None:
            return [Piece("content", text)] if text else []
        return self._parser.push(text) + (self._parser.finish() if is_last else [])

    def _add(self, piece: Piece) -> None:
        if piece.kind == "call":
            self._begin_item("function_call", piece.text)
            return
        kind = {"content": "message", "reasoning": "reasoning", "arguments": "function_call"}[piece.kind]
        if self._open is None or self._open["type"] != kind:
            self._begin_item(kind)
        assert self._open is not None
        self._texts.append(piece.text)
        at = f'"item_id":"{self._open["id"]}","output_index":{len(self._items) - 1}'
        if kind == "function_call":
            self._frame("response.function_call_arguments.delta", f'{at},"delta":{quote(piece.text)}')
        else:
            logprobs = ',"logprobs":[]' if kind == "message" else ""
            delta = f'{at},"content_index":0,"delta":{quote(piece.text)}{logprobs}'
            self._frame(f"{_DELTAS[kind]}.delta", delta)

    def _begin_item(self, kind: str, name: str = "") -> None:
        self._end_item("completed")
        item: dict[str, Any] = {
            "id": f"{_PREFIXES[kind]}_{secrets.token_hex(12)}", "type": kind, "status": "in_progress"
        }
        if kind == "function_call":
            assert self._reading is not None
            call_id = self._reading.new_call_id(secrets.token_hex(12))
            item |= {"call_id": call_id, "name": name, "arguments": ""}
        elif kind == "message":
            item |= {"role": "assistant", "content": []}
        else:
            item |= {"summary": [], "content": []}
        self._items.append(item)
        self._open = item
        self._emit("response.output_item.added", output_index=len(self._items) - 1, item=item)
        if kind != "function_call":
            self._emit("response.content_part.added", **self._at(), content_index=0, part=_part(kind, ""))

    def _end_item(self, status: str) -> None:
        item = self._open
        if item is None:
            return
        kind, text = item["type"], "".join(self._texts)
        item["status"] = status
        if kind == "function_call":
            item["arguments"] = text
            self._emit(
                "response.function_call_arguments.done", **self._at(), name=item["name"], arguments=text
            )
        else:
            part = _part(kind, text)
            item["content"] = [part]
            logprobs: dict[str, Any] = {"logprobs": []} if kind == "message" else {}
            self._emit(f"{_DELTAS[kind]}.done", **self._at(), content_index=0, text=text, **logprobs)
            self._emit("response.content_part.done", **self._at(), content_index=0, part=part)
        self._emit("response.output_item.done", output_index=len(self._items) - 1, item=item)
        self._open, self._texts = None, []

    def _at(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _emit(self, type: str, **fields: Any) -> None:
        self._frame(type, compact(fields)[1:-1])

    def _frame(self, type: str, fields: str) -> None:
        self._out.append(
            f'event: {type}\ndata: {{"type":"{type}","sequence_number":{self._sequence},{fields}}}\n\n'
        )
        self._sequence += 1

    def _take(self) -> str:
        out, self._out = "".join(self._out), []
        return out

    def _response(self) -> dict[str, Any]:
        generation = self._asked.generation
        ended = self._status in ("completed", "incomplete")
        return {
            "id": generation.id,
            "object": "response",
            "created_at": generation.created,
            "status": self._status,
            "error": None,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "model": generation.model,
            "output": self._items if ended else [],
            "usage": self._usage() if ended else None,
            **dict(echoed(self._asked.fields)),
        }

    def _usage(self) -> dict[str, Any]:
        return {
            "input_tokens": self._num_prompt,
            "input_tokens_details": {"cached_tokens": self._num_cached},
            "output_tokens": self._num_output,
            "output_tokens_details": {"reasoning_tokens": self._num_reasoning},
            "total_tokens": self._num_prompt + self._num_output,
        }


def _part(kind: str, text: str) -> dict[str, Any]:
    if kind == "message":
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "reasoning_text", "text": text}
