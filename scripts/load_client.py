"""One streamed completion, measured, and loads made of many. Works with every OpenAI-compatible server.

Shared by the bench_*.py scripts. Needs aiohttp alone.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp

# Each is one token, with a space before it, in the vocabularies of both models that are served by name.
WORDS = (
    "time year people way day man thing woman life child world school state family student group country "
    "problem hand part place case week company system program question work government number night "
    "point home water room mother area money story fact month"
).split()


@dataclass
class Answer:
    """What became of one request. Times are of `time.perf_counter()`; `seconds` since `sent_s`."""

    sent_s: float = 0.0
    ended_s: float = 0.0
    status: int = 0  # of HTTP; 0: there was no answer
    token_times_s: list[float] = field(default_factory=list)  # of the chunks that brought text
    num_prompt: int = 0
    num_cached: int = 0
    num_output: int = 0
    error: str | None = None  # what went wrong, refusals included
    code: str | None = None  # the server's own name for it
    retry_after_s: int | None = None

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first text."""
        return self.token_times_s[0] - self.sent_s if self.token_times_s else None

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """(begin, end) of the time between one piece of text and the next."""
        return list(zip(self.token_times_s, self.token_times_s[1:]))


class Prompts:
    """Random words, about one token each. No two prompts begin alike unless they are made to."""

    def __init__(self, seed: object = 0):
        self._random = random.Random(f"{seed}")

    def take(self, num_words: int, *, after: str = "") -> str:
        words = " ".join(self._random.choices(WORDS, k=num_words))
        return f"{after} {words}" if after else words


def session() -> aiohttp.ClientSession:
    """Without limits of its own. Each request has a new connection, as from as many clients."""
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=None), connector=aiohttp.TCPConnector(limit=0, force_close=True)
    )


async def complete(
    http: aiohttp.ClientSession, url: str, prompt: str, max_tokens: int, answer: Answer | None = None
) -> Answer:
    """Stream `max_tokens` greedy tokens; fills `answer` as they come, if it is given.

    Whatever goes wrong is `answer.error`, nothing is raised. A stream without its end is an error, and so
    is an answer of another length: the end of sequence is ignored.
    """
    answer = Answer() if answer is None else answer
    body = {
        "prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True,
        "skip_special_tokens": False,  # each token is a piece of text, the end of sequence too
        "stream": True, "stream_options": {"include_usage": True},
    }  # fmt: skip
    answer.sent_s = time.perf_counter()
    try:
        async with http.post(url + "/v1/completions", json=body) as response:
            answer.status = response.status
            if response.status == 200:
                await _read_stream(response, answer)
                if answer.error is None and answer.num_output != max_tokens:
                    answer.error = f"{answer.num_output} tokens in place of {max_tokens}"
            else:
                await _read_refusal(response, answer)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.ended_s = time.perf_counter()
    return answer


async def _read_stream(response: aiohttp.ClientResponse, answer: Answer) -> None:
    ended = False
    async for line in response.content:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            ended = True
            continue
        chunk = json.loads(data)
        if "error" in chunk:
            answer.error = f"in the stream: {chunk['error'].get('message')}"
            answer.code = chunk["error"].get("code")
            return
        if any(choice.get("text") for choice in chunk.get("choices", ())):
            answer.token_times_s.append(time.perf_counter())
        if usage := chunk.get("usage"):
            details = usage.get("prompt_tokens_details") or {}
            answer.num_prompt, answer.num_output = usage["prompt_tokens"], usage["completion_tokens"]
            answer.num_cached = details.get("cached_tokens") or 0
    if not ended:
        answer.error = "the stream has no end"


async def _read_refusal(response: aiohttp.ClientResponse, answer: Answer) -> None:
    text = await response.text()
    retry_after = response.headers.get("Retry-After", "")
    answer.retry_after_s = int(retry_after) if retry_after.isdecimal() else None
    answer.error = f"HTTP {response.status}: {text[:200]}"
    with suppress(ValueError, TypeError, KeyError):  # not of our kind; the text says what there is to say
        answer.code = json.loads(text)["error"]["code"]


@dataclass
class Load:
    """The answers of one load, and the seconds from the first request to the last end."""

    answers: list[Answer]
    took_s: float

    @property
    def done(self) -> list[Answer]:
        """Those that were answered in full."""
        return [answer for answer in self.answers if answer.error is None]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of full answers alone."""
        return sum(answer.num_output for answer in self.done) / self.took_s

    def ttfts_s(self) -> list[float]:
        return [answer.ttft_s for answer in self.done if answer.ttft_s is not None]

    def gaps_s(self) -> list[float]:
        return [end - begin for answer in self.done for begin, end in answer.gaps]


async def closed_loop(
    http: aiohttp.ClientSession, url: str, prompts: Sequence[str], max_tokens: int, *, clients: int
) -> Load:
    """Send the prompts, each as soon as one of so many clients has its last answer."""
    rest = iter(prompts)
    answers: list[Answer] = []

    async def client() -> None:
        for prompt in rest:
            answers.append(await complete(http, url, prompt, max_tokens))

    began_s = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    return Load(answers, time.perf_counter() - began_s)


async def open_loop(
    http: aiohttp.ClientSession, url: str, arrivals: Iterable[tuple[float, str, int]]
) -> Load:
    """Send (seconds from now, prompt, max_tokens) in their time, whatever becomes of those before."""
    began_s = time.perf_counter()

    async def client(at_s: float, prompt: str, max_tokens: int) -> Answer:
        await asyncio.sleep(at_s - (time.perf_counter() - began_s))
        return await complete(http, url, prompt, max_tokens)

    answers = await asyncio.gather(*(client(*arrival) for arrival in arrivals))
    return Load(list(answers), time.perf_counter() - began_s)


def poisson(rate: float, seconds: float, seed: object = 0) -> list[float]:
    """Random arrival times in [0, seconds), `rate` a second on average."""
    draw = random.Random(f"{seed}")
    times, at = [], draw.expovariate(rate)
    while at < seconds:
        times.append(at)
        at += draw.expovariate(rate)
    return times


def percentile(values: Iterable[float], share: float) -> float:
    """The smallest of the values that at least this share of them does not exceed; NaN if there is none."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    return ordered[max(0, math.ceil(share * len(ordered) - 1e-9) - 1)]


def errors(answers: Iterable[Answer], *, but: frozenset[int] = frozenset()) -> list[str]:
    """What went wrong and how often, refusals of a status in `but` left out."""
    counts = Counter(a.error for a in answers if a.error is not None and a.status not in but)
    return [f"{count} x {error}" for error, count in counts.most_common()]
