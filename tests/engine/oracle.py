"""What a request must answer, worked out from the whole text at once."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import NamedTuple

from jaxserve.types import SamplingParams
from tests.fakes import FakeTokenizer


class Answer(NamedTuple):
    token_ids: tuple[int, ...]
    text: str
    finish_reason: str
    stop_reason: str | int | None


def answer(ids: Sequence[int], params: SamplingParams, tokenizer: FakeTokenizer) -> Answer:
    """`ids` are the model's, `max_tokens` of them; the answer ends at whatever ends it first."""
    eos_ids = frozenset() if params.ignore_eos else tokenizer.eos_ids
    length, reason, stop_reason = len(ids), "length", None
    for n, token_id in enumerate(ids, 1):
        if token_id in eos_ids or token_id in params.stop_token_ids:
            length, reason = n, "stop"
            stop_reason = None if token_id in eos_ids else token_id
            break
    ids = ids[:length]
    shown = ids[:-1] if reason == "stop" else ids
    text = tokenizer.decode(shown, skip_special=params.skip_special_tokens)
    for end in range(1, len(text) + 1):
        complete = [stop for stop in params.stop if text[:end].endswith(stop)]
        if complete:
            stop = max(complete, key=len)
            cut = text[: end if params.include_stop_str_in_output else end - len(stop)]
            return Answer(tuple(ids[: _ids_for(end, shown, ids, params, tokenizer)]), cut, "stop", stop)
    return Answer(tuple(ids), text, reason, stop_reason)


def _ids_for(
    end: int, shown: Sequence[int], ids: Sequence[int], params: SamplingParams, tokenizer: FakeTokenizer
) -> int:
    """How many ids it takes until `end` characters are certain; all, if the last are so at the end only."""
    for n in range(1, len(shown) + 1):
        raw = b"".join(
            tokenizer.token_bytes(i)
            for i in shown[:n]
            if not (params.skip_special_tokens and tokenizer.is_special(i))
        )
        if len(codecs.getincrementaldecoder("utf-8")("replace").decode(raw)) >= end:
            return n
    return len(ids)
