"""From the engine's events to OpenAI's responses and chunks. Pure.

A chunk is put together from parts that are JSON already: only the text is escaped, once per chunk
(about 1 µs, where `json.dumps` of the whole takes 10). Text is escaped to ASCII, because some clients
split the stream at the line separators that Unicode knows and SSE does not.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import partial
from json.encoder import encode_basestring_ascii as quote
from typing import Any

from jaxserve.server.logprobs import (
    Entry,
    PendingEntries,
    chat_logprobs,
    completion_logprobs,
    prompt_entries,
    prompt_logprobs,
)
from jaxserve.server.message import Message
from jaxserve.server.openai import Generation
from jaxserve.tokenizer.base import Tokenizer
from jaxserve.types import Event, TokenLogprobs

compact = partial(json.dumps, separators=(",", ":"))


@dataclass(slots=True)
class Choice:
    """What is known so far of one answer to a prompt."""

    prompt: int  # number of the prompt
    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    cumulative_logprob: float = 0.0  # of its tokens, where they were asked for
    pending: PendingEntries | None = None  # log-probabilities of its tokens, if the client asked for them
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    # Kept for the answer that is not streamed.
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    last: Event | None = None  # the event that ended it

    def count(self, event: Event) -> None:
        self.num_output_tokens = event.num_output_tokens
        self.num_cached_tokens = event.num_cached_tokens
        for token in event.logprobs:
            self.cumulative_logprob += token.logprob
        if self.pending is not None:
            self.pending.add(event.logprobs)
        if event.prompt_logprobs is not None:
            self.prompt_logprobs = event.prompt_logprobs

    def usage(self) -> dict[str, Any]:
        return usage([self])


def usage(choices: list[Choice], num_candidates: int = 1) -> dict[str, Any]:
    """Each prompt counts once, however many of the `choices`, which stand together, answer it."""
    firsts = choices[::num_candidates]
    prompt = sum(choice.num_prompt_tokens for choice in firsts)
    output = sum(choice.num_output_tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": output,
        "total_tokens": prompt + output,
        "prompt_tokens_details": {"cached_tokens": sum(choice.num_cached_tokens for choice in firsts)},
    }


class Renderer(ABC):
    """One request's answer, whole or in chunks. Everything it gives is JSON text."""

    object: str  # of the whole answer
    chunk_object: str

    def __init__(self, generation: Generation):
        self._generation = generation
        # Whether each token shows in the chunks, so that one without text needs a chunk too.
        self._shows_tokens = generation.return_token_ids
        self._holds_back = generation.reading is not None  # text, until it is known what it is a part of
        self.choices = [
            Choice(i // generation.num_candidates, len(request.prompt_ids))
            for i, request in enumerate(generation.requests)
        ]
        if generation.logprobs is not None:
            for choice, request in zip(self.choices, generation.requests):
                choice.pending = PendingEntries(
                    self._tokenizer,
                    skip_special=request.params.skip_special_tokens,
                    offset=len(self._echo(choice)),
                    shown_ids=request.params.shown_ids,
                )
        self._begun = [False] * len(self.choices)
        self._head = self._head_of(self.chunk_object) + ',"choices":['
        # With include_usage every chunk but the last says "usage": null, as at OpenAI.
        self._tail = ',"usage":null}' if generation.include_usage else "}"

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
            chunks += self._open(index, choice)
        shows = event.text or (self._shows_tokens and event.token_ids)
        if shows or (self._holds_back and event.finish_reason is not None):
            entries = choice.pending.show(len(event.text)) if choice.pending is not None else []
            for delta in self._deltas(index, event, self._logprobs_json(entries)):
                chunks.append(self._chunk(index, delta, choice))
        if event.finish_reason is not None:
            choice.last = event
            entries = choice.pending.rest() if choice.pending is not None else []
            finish = self._finish(index, event, self._logprobs_json(entries))
            chunks.append(self._chunk(index, finish, choice))
        return chunks

    def collect(self, index: int, event: Event) -> None:
        """Take `event` into the answer that `response` will give."""
        choice = self.choices[index]
        choice.count(event)
        if event.text:
            choice.texts.append(event.text)
        if self._generation.return_token_ids:
            choice.token_ids += event.token_ids
        if event.finish_reason is not None:
            choice.last = event

    def response(self) -> str:
        """The whole answer; every choice has ended."""
        rest = {
            **self._whole_extras(),
            "choices": [self._whole(index, choice) for index, choice in enumerate(self._chosen())],
            "usage": self._usage(),
        }
        return f"{self._head_of(self.object)},{compact(rest)[1:]}"

    def usage_chunk(self) -> str:
        """The last chunk of a stream that was asked for usage."""
        return f'{self._head}],"usage":{compact(self._usage())}}}'

    def _usage(self) -> dict[str, Any]:
        return usage(self.choices, self._generation.num_candidates)

    @property
    def _tokenizer(self) -> Tokenizer:
        assert self._generation.tokenizer is not None, "log-probabilities are spelled by the tokenizer"
        return self._generation.tokenizer

    def _echo(self, choice: Choice) -> str:
        """The text of the prompt where it stands before the answer."""
        echoes = self._generation.echoes
        return "" if echoes is None else echoes[choice.prompt]

    def _prompt_entries(self, choice: Choice) -> list[Entry]:
        """Of an echoed prompt's tokens, if the client asked for log-probabilities."""
        if choice.pending is None or self._generation.echoes is None:
            return []
        figures = self._prompt_figures(choice)
        return prompt_entries(
            self._tokenizer, self._prompt_ids(choice.prompt), figures, self._echo(choice)
        )

    def _prompt_figures(self, choice: Choice) -> tuple[TokenLogprobs | None, ...]:
        first = self.choices[choice.prompt * self._generation.num_candidates]
        figures = choice.prompt_logprobs or first.prompt_logprobs
        assert figures is not None, "the first event has the prompt's log-probabilities"
        return figures

    def _all_entries(self, choice: Choice) -> list[Entry]:
        """Of a choice that has ended and is not streamed."""
        assert choice.pending is not None
        shown = choice.pending.show(sum(map(len, choice.texts)))
        return [*self._prompt_entries(choice), *shown, *choice.pending.rest()]

    def _logprobs_json(self, entries: list[Entry]) -> str:
        """The field of a chunk."""
        return compact(self._logprobs(entries)) if entries else "null"

    def _whole_logprobs(self, choice: Choice) -> dict[str, Any] | None:
        return None if choice.pending is None else self._logprobs(self._all_entries(choice))

    def _whole_prompt_logprobs(self, choice: Choice) -> dict[str, Any]:
        """The field `prompt_logprobs`, where it was asked for."""
        if (count := self._generation.prompt_logprobs) is None:
            return {}
        return {"prompt_logprobs": prompt_logprobs(self._prompt_figures(choice), count, self._tokenizer)}

    def _chosen(self) -> list[Choice]:
        """The choices to give: the `n` likeliest candidates of each prompt, the likeliest first."""
        n, num_candidates = self._generation.n, self._generation.num_candidates
        if n == num_candidates:
            return self.choices
        chosen = []
        for first in range(0, len(self.choices), num_candidates):
            candidates = self.choices[first : first + num_candidates]
            chosen += sorted(candidates, key=lambda choice: -choice.cumulative_logprob)[:n]
        return chosen

    def _prompt_ids(self, prompt: int) -> tuple[int, ...]:
        return self._generation.requests[prompt * self._generation.num_candidates].prompt_ids

    def _token_ids(self, event: Event) -> str:
        """The field of a chunk that tells the ids behind its text, where it was asked for."""
        return f',"token_ids":{compact(event.token_ids)}' if self._generation.return_token_ids else ""

    def _chunk(self, index: int, choice_json: str, choice: Choice, extras: str = "") -> str:
        tail = self._tail
        if self._generation.continuous_usage:
            tail = f',"usage":{compact(choice.usage())}}}'
        return f'{self._head}{{"index":{index},{choice_json}}}]{extras}{tail}'

    def _whole_extras(self) -> dict[str, Any]:
        """Further fields of the whole answer."""
        return {}

    @abstractmethod
    def _open(self, index: int, choice: Choice) -> list[str]:
        """The chunks before a choice's first text."""

    @abstractmethod
    def _delta(self, index: int, event: Event, logprobs: str) -> str: ...

    def _deltas(self, index: int, event: Event, logprobs: str) -> list[str]:
        return [self._delta(index, event, logprobs)]

    @abstractmethod
    def _finish(self, index: int, event: Event, logprobs: str) -> str: ...

    @abstractmethod
    def _logprobs(self, entries: list[Entry]) -> dict[str, Any]: ...

    @abstractmethod
    def _whole(self, index: int, choice: Choice) -> dict[str, Any]: ...


class CompletionRenderer(Renderer):
    object = chunk_object = "text_completion"

    def _open(self, index: int, choice: Choice) -> list[str]:
        echo, wants_ids = self._echo(choice), self._generation.return_token_ids
        entries = self._prompt_entries(choice)  # there may be some of a prompt without text: a BOS alone
        if not (echo or wants_ids or entries):
            return []
        logprobs = self._logprobs_json(entries)
        opening = f'"text":{quote(echo)},"logprobs":{logprobs},"finish_reason":null,"stop_reason":null'
        if wants_ids:
            opening += f',"prompt_token_ids":{compact(self._prompt_ids(choice.prompt))},"token_ids":[]'
        return [self._chunk(index, opening, choice)]

    def _delta(self, index: int, event: Event, logprobs: str) -> str:
        text = f'"text":{quote(event.text)},"logprobs":{logprobs},"finish_reason":null,"stop_reason":null'
        return text + self._token_ids(event)

    def _finish(self, index: int, event: Event, logprobs: str) -> str:
        reason, stop = json.dumps(event.finish_reason), json.dumps(event.stop_reason)
        return f'"text":"","logprobs":{logprobs},"finish_reason":{reason},"stop_reason":{stop}'

    def _logprobs(self, entries: list[Entry]) -> dict[str, Any]:
        return completion_logprobs(entries, self._generation.logprobs or 0, self._tokenizer)

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        assert choice.last is not None
        ids: dict[str, Any] = {}
        if self._generation.return_token_ids:
            ids = {"prompt_token_ids": self._prompt_ids(choice.prompt), "token_ids": choice.token_ids}
        return {
            "index": index,
            "text": self._echo(choice) + "".join(choice.texts),
            "logprobs": self._whole_logprobs(choice),
            "finish_reason": choice.last.finish_reason,
            "stop_reason": choice.last.stop_reason,
            **self._whole_prompt_logprobs(choice),
            **ids,
        }


class ChatRenderer(Renderer):
    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, generation: Generation):
        super().__init__(generation)
        reading = generation.reading
        # By choice; None where all text is content.
        self._messages = None if reading is None else [Message(reading) for _ in self.choices]

    def _whole_extras(self) -> dict[str, Any]:
        ids = {"prompt_token_ids": self._prompt_ids(0)} if self._generation.return_token_ids else {}
        return {**ids, **self._whole_prompt_logprobs(self.choices[0])}

    def _open(self, index: int, choice: Choice) -> list[str]:
        opening = '"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        extras = ""
        if self._generation.return_token_ids:
            extras = f',"prompt_token_ids":{compact(self._prompt_ids(choice.prompt))}'
        return [self._chunk(index, opening, choice, extras)]

    def _delta(self, index: int, event: Event, logprobs: str) -> str:
        delta = f'"delta":{{"content":{quote(event.text)}}},"logprobs":{logprobs},"finish_reason":null'
        return delta + self._token_ids(event)

    def _deltas(self, index: int, event: Event, logprobs: str) -> list[str]:
        if self._messages is None:
            return [self._delta(index, event, logprobs)]
        is_last = event.finish_reason is not None
        deltas = self._messages[index].deltas(event.text, is_last=is_last)
        if not deltas and (logprobs != "null" or (self._shows_tokens and event.token_ids)):
            deltas = ["{}"]  # what is known of the tokens doesn't wait for their text
        parts = []
        for i, delta in enumerate(deltas):
            about = "null" if i else logprobs
            part = f'"delta":{delta},"logprobs":{about},"finish_reason":null'
            parts.append(part if i else part + self._token_ids(event))
        return parts

    def _finish_reason(self, index: int, event: Event) -> str | None:
        """A call that was cut off is no call to make: then the reason is what cut it."""
        calls = self._messages is not None and self._messages[index].num_calls
        return "tool_calls" if calls and event.finish_reason == "stop" else event.finish_reason

    def _finish(self, index: int, event: Event, logprobs: str) -> str:
        reason, stop = json.dumps(self._finish_reason(index, event)), json.dumps(event.stop_reason)
        return f'"delta":{{}},"logprobs":{logprobs},"finish_reason":{reason},"stop_reason":{stop}'

    def _logprobs(self, entries: list[Entry]) -> dict[str, Any]:
        return chat_logprobs(entries, self._generation.logprobs or 0, self._tokenizer)

    def _whole(self, index: int, choice: Choice) -> dict[str, Any]:
        assert choice.last is not None
        text = "".join(choice.texts)
        message = {"content": text} if self._messages is None else self._messages[index].whole(text)
        return {
            "index": index,
            "message": {
                "role": "assistant",
                **message,
                "refusal": None,
                "annotations": [],
            },
            "logprobs": self._whole_logprobs(choice),
            "finish_reason": self._finish_reason(index, choice.last),
            "stop_reason": choice.last.stop_reason,
            **({"token_ids": choice.token_ids} if self._generation.return_token_ids else {}),
        }


def renderer(generation: Generation) -> Renderer:
    return (CompletionRenderer if generation.kind == "completion" else ChatRenderer)(generation)
