"""From the engine's events to OpenAI's responses and chunks. Pure.

A chunk is put together from parts that are JSON already: only the text is escaped, once per chunk
(about 1 µs, where `json.dumps` of the whole takes 10). Text is escaped to ASCII, because some clients
split the stream at the line separators that Unicode knows and SSE does not.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from jaxserve.server.openai import Generation
from jaxserve.types import Event


@dataclass(slots=True)
class Choice:
    """What is known of one choice so far."""

    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    texts: list[str] = field(default_factory=list)  # kept for the answer that is not streamed
    last: Event | None = None  # the event that ended it

    def count(self, event: Event) -> None:
        self.num_output_tokens = event.num_output_tokens
        self.num_cached_tokens = event.num_cached_tokens

    def usage(self) -> dict[str, Any]:
        return usage([self])


def usage(choices: list[Choice]) -> dict[str, Any]:
    prompt = sum(choice.num_prompt_tokens for choice in choices)
    output = sum(choice.num_output_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in choices)},
    }


class Renderer(ABC):
    """One request's answer, whole or in chunks. Everything it gives is JSON text."""

    object: str  # of the whole answer
    chunk_object: str
    _opening: str | None = None  # the chunk before a choice's first text

    def __init__(self, generation: Generation):
        self._generation = generation
        self.choices = [Choice(len(request.prompt_ids)) for request in generation.requests]
        self._begun = [False] * len(self.choices)
        self._head = self._head_of(self.chunk_object) + ',"choices":['
        # With include_usage every chunk but the last says "usage": null, as at OpenAI.
        self._tail = '],"usage":null}' if generation.include_usage else "]}"

    def _head_of(self, kind: str) -> str:
        g = self._generation
        return json.dumps({
            "id": g.id,
            "object": kind,
            "created": g.created,
            "model": g.model,
            "system_fingerprint": g.fingerprint,
        }, separators=(",", ":"))[:-1]

    def chunks(self, index: int, event: Event) -> list[str]:
        """The chunks that tell of `event`: none when there is nothing to show yet."""
        choice = self.choices[index]
        choice.count(event)
        chunks = []
        if not self._begun[index]:
            self._begun[index] = True
            if self._opening is not None:
                chunks.append(self._chunk(index, self._opening, choice))
        if event.text:
            chunks.append(self._chunk(index, self._delta(event.text), choice))
        if event.finish_reason is not None:
            choice.last = event
            chunks.append(self._chunk(index, self._finish(event), choice))
        return chunks

    def collect(self, index: int, event: Event) -> None:
        """Take `event` into the answer that `response` will give."""
        choice = self.choices[index]
        choice.count(event)
        if event.text:
            choice.texts.append(event.text)
        if event.finish_reason is not None:
            choice.last = event

    def response(self) -> str:
        """The whole answer; every choice has ended."""
        choices = [self._whole(index, choice) for index, choice in enumerate(self.choices)]
        rest = json.dumps({"choices": choices, "usage": usage(self.choices)}, separators=(",", ":"))
        return f"{self._head_of(self.object)},{rest[1:]}"

    def usage_chunk(self) -> str:
        """The last chunk of a stream that was asked for usage."""
        return f'{self._head}],"usage":{json.dumps(usage(self.choices), separators=(",", ":"))}}}'

    def _chunk(self, index: int, choice_json: str, choice: Choice) -> str:
        tail = self._tail
        if self._generation.continuous_usage:
            tail = f'],"usage":{json.dumps(choice.usage(), separators=(",", ":"))}}}'
        return f'{self._head}{{"index":{index},{choice_json}}}{tail}'

    @abstractmethod
    def _delta(self, text: str) -> str: ...

    @abstractmethod
    def _finish(self, event: Event) -> str: ...

    @abstractmethod
    def _whole(self, index: int, choice: Choice) -> dict[str, Any]: ...


class CompletionRenderer(Renderer):
    object = chunk_object = "text_completion"

    def _delta(self, text: str) -> str:
        return f'"text":{quote(text)},"logprobs":null,"finish_reason":null,"stop_reason":null'

    def _finish(self, event: Event) -> str:
        reason, stop = json.dumps(event.finish_reason), json.dumps(event.stop_reason)
        return f'"text":"","logprobs":null,"finish_reason":{reason},"stop_reason":{stop}'

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        assert choice.last is not None
        return {
            "index": index,
            "text": "".join(choice.texts),
            "logprobs": None,
            "finish_reason": choice.last.finish_reason,
            "stop_reason": choice.last.stop_reason,
        }


class ChatRenderer(Renderer):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"
    _opening = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'

    def _delta(self, text: str) -> str:
        return f'"delta":{{"content":{quote(text)}}},"logprobs":null,"finish_reason":null'

    def _finish(self, event: Event) -> str:
        reason, stop = json.dumps(event.finish_reason), json.dumps(event.stop_reason)
        return f'"delta":{{}},"logprobs":null,"finish_reason":{reason},"stop_reason":{stop}'

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        assert choice.last is not None
        return {
            "index": index,
            "message": {
                "role": "assistant",
                "content": "".join(choice.texts),
                "refusal": None,
                "annotations": [],
            },
            "logprobs": None,
            "finish_reason": choice.last.finish_reason,
            "stop_reason": choice.last.stop_reason,
        }


def renderer(generation: Generation) -> Renderer:
    return (CompletionRenderer if generation.kind == "completion" else ChatRenderer)(generation)
