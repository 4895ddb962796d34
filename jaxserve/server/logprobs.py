"""Log-probabilities as OpenAI's completions and chat show them, and vLLM's `prompt_logprobs`.

Every token of an answer has one entry: special ones too, the one that ended it too, and those whose text a
stop string cut off. In a stream an entry is in the chunk that has the first character of the token's text;
one without text of its own (a special token, or half of a character) goes with the next text, or with the
end. So joined chunks are the whole answer's arrays, and `text_offset` is where the token's text begins in it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from jaxserve.tokenizer.base import Tokenizer
from jaxserve.tokenizer.detokenizer import IncrementalDetokenizer
from jaxserve.types import TokenLogprobs

LOWEST = -9999.0  # JSON has no infinity


@dataclass(frozen=True, slots=True)
class Entry:
    """One token of an answer. `figures` is None for the first of a prompt, which nothing predicts."""

    token_id: int
    figures: TokenLogprobs | None
    offset: int  # of its first character in the text that is shown


class Offsets:
    """Where the text of one token after the other begins, if that of the first does at `start`."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool,
        start: int,
        shown_ids: frozenset[int] = frozenset(),
    ):
        self._tokenizer = tokenizer
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, skip_special=skip_special, shown_ids=shown_ids
        )
        self._end = start

    def next(self, token_id: int) -> int:
        begin = self._end
        text = self._detokenizer.add(token_id)
        self._end += len(text)
        own = _text_of(self._tokenizer.token_bytes(token_id))
        # Half of a character begins where the character will be. What comes in front of a whole text is
        # U+FFFD, for a half before it that was never completed.
        return self._end - len(own) if text and own else begin


class PendingEntries:
    """Entries of one answer that wait for their text to be shown."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special: bool,
        offset: int,
        shown_ids: frozenset[int] = frozenset(),
    ):
        self._offsets = Offsets(tokenizer, skip_special=skip_special, start=offset, shown_ids=shown_ids)
        self._shown = offset
        self._waiting: deque[Entry] = deque()

    def add(self, figures: Iterable[TokenLogprobs]) -> None:
        """The next tokens of the answer."""
        self._waiting.extend(Entry(one.token_id, one, self._offsets.next(one.token_id)) for one in figures)

    def show(self, num_chars: int) -> list[Entry]:
        """The entries that go with the next `num_chars` characters."""
        self._shown += num_chars
        entries = []
        while self._waiting and self._waiting[0].offset < self._shown:
            entries.append(self._waiting.popleft())
        return entries

    def rest(self) -> list[Entry]:
        """All others, at the end of the answer; text that was cut off begins where the answer ends."""
        entries = [Entry(one.token_id, one.figures, min(one.offset, self._shown)) for one in self._waiting]
        self._waiting.clear()
        return entries


def prompt_entries(
    tokenizer: Tokenizer, ids: Sequence[int], figures: Sequence[TokenLogprobs | None], text: str
) -> list[Entry]:
    """Entries of a prompt that is shown as `text`.

    The ids may stand for more than that: a BOS, or a space, that the tokenizer put in front; or special
    tokens that are not shown. Such ids have no width.
    """
    for skip_special in (False, True):
        whole = tokenizer.decode(ids, skip_special=skip_special)
        if whole.endswith(text):
            break
    else:  # the tokenizer does not give back the text it was given
        skip_special, whole = False, text
    offsets = Offsets(tokenizer, skip_special=skip_special, start=len(text) - len(whole))
    return [
        Entry(token_id, one, min(max(offsets.next(token_id), 0), len(text)))
        for token_id, one in zip(ids, figures)
    ]


def completion_logprobs(entries: Sequence[Entry], count: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """The legacy arrays. `top_logprobs` has the `count` likeliest, and the token itself."""
    return {
        "tokens": [spelled(entry.token_id, tokenizer) for entry in entries],
        "token_logprobs": [entry.figures and _finite(entry.figures.logprob) for entry in entries],
        "top_logprobs": [entry.figures and _likeliest(entry.figures, count, tokenizer) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def chat_logprobs(entries: Sequence[Entry], count: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """`content` with the `count` likeliest of each place."""
    content = []
    for entry in entries:
        figures = entry.figures
        assert figures is not None, "answers have figures throughout"
        content.append({
            **_chat_token(figures.token_id, figures.logprob, tokenizer),
            "top_logprobs": [
                _chat_token(token_id, logprob, tokenizer)
                for token_id, logprob in zip(figures.top_ids[:count], figures.top_logprobs)
            ],
        })
    return {"content": content, "refusal": None}


def prompt_logprobs(
    figures: Sequence[TokenLogprobs | None], count: int, tokenizer: Tokenizer
) -> list[dict[str, Any] | None]:
    """By prompt token, the first being None: figures by id, of the `count` likeliest and the token itself."""
    return [None if one is None else _by_id(one, count, tokenizer) for one in figures]


def spelled(token_id: int, tokenizer: Tokenizer) -> str:
    """The token's text; its bytes if they are no text alone, and its id if it has none."""
    raw = tokenizer.token_bytes(token_id)
    if not raw:
        return f"token_id:{token_id}"
    text = _text_of(raw)
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw) if text is None else text


def _text_of(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


def _likeliest(figures: TokenLogprobs, count: int, tokenizer: Tokenizer) -> dict[str, float]:
    """By text. Of tokens of the same text the one at hand, or else the likeliest, has it as its key."""
    own = spelled(figures.token_id, tokenizer)
    found: dict[str, float] = {}
    for token_id, logprob in zip(figures.top_ids[:count], figures.top_logprobs):
        name = spelled(token_id, tokenizer)
        if token_id != figures.token_id and (name == own or name in found):
            name = f"token_id:{token_id}"
        found[name] = _finite(logprob)
    found.setdefault(own, _finite(figures.logprob))
    return found


def _chat_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {
        "token": spelled(token_id, tokenizer),
        "logprob": _finite(logprob),
        "bytes": list(raw) if raw else None,
    }


def _by_id(figures: TokenLogprobs, count: int, tokenizer: Tokenizer) -> dict[str, Any]:
    ranked = [(figures.token_id, figures.logprob, figures.rank)]
    ranked += [
        (token_id, logprob, rank)
        for rank, (token_id, logprob) in enumerate(zip(figures.top_ids[:count], figures.top_logprobs), 1)
        if token_id != figures.token_id
    ]
    return {
        str(token_id): {
            "logprob": _finite(logprob),
            "rank": rank,
            "decoded_token": tokenizer.token_bytes(token_id).decode("utf-8", "replace"),
        }
        for token_id, logprob, rank in ranked
    }


def _finite(logprob: float) -> float:
    return logprob if logprob > LOWEST else LOWEST  # NaN too
