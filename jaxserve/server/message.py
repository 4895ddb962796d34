"""Pieces of a chat answer as OpenAI's deltas, and as the message of a whole answer."""

from __future__ import annotations

import secrets
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from jaxserve.server.tooling import Reading
from jaxserve.tools.pieces import Piece


class Message:
    """One answer, taken apart as it comes."""

    def __init__(self, reading: Reading):
        self._reading = reading
        self._parser = reading.parser()
        self.num_calls = 0

    def deltas(self, text: str, *, is_last: bool) -> list[str]:
        """The JSON of the deltas that `text` brings. A call's id and name come in a delta of their own."""
        return [self._delta(piece) for piece in self._pieces(text, is_last)]

    def whole(self, text: str) -> dict[str, Any]:
        """The fields of the message whose text this is, from beginning to end."""
        content: list[str] = []
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        for piece in self._pieces(text, True):
            if piece.kind == "call":
                function = {"name": piece.text, "arguments": ""}
                calls.append({"id": self._new_id(), "type": "function", "function": function})
            elif piece.kind == "arguments":
                calls[piece.index]["function"]["arguments"] += piece.text
            else:
                (thoughts if piece.kind == "reasoning" else content).append(piece.text)
        message: dict[str, Any] = {"content": "".join(content) or (None if calls else "")}
        if self._reading.thinks:
            message["reasoning_content"] = "".join(thoughts) or None
        if calls:
            message["tool_calls"] = calls
        return message

    def _pieces(self, text: str, is_last: bool) -> list[Piece]:
        pieces = self._parser.push(text)
        if is_last:
            pieces += self._parser.finish()
        self.num_calls += sum(piece.kind == "call" for piece in pieces)
        return pieces

    def _delta(self, piece: Piece) -> str:
        if piece.kind == "content":
            return f'{{"content":{quote(piece.text)}}}'
        if piece.kind == "reasoning":
            return f'{{"reasoning_content":{quote(piece.text)}}}'
        if piece.kind == "arguments":
            call = f'"function":{{"arguments":{quote(piece.text)}}}'
        else:
            name = quote(piece.text)
            call = f'"id":"{self._new_id()}","type":"function","function":{{"name":{name},"arguments":""}}'
        return f'{{"tool_calls":[{{"index":{piece.index},{call}}}]}}'

    def _new_id(self) -> str:
        return self._reading.new_call_id(secrets.token_hex(12))
