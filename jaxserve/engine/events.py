"""What the engine tells of a request: an event for a token, and the last one."""

from __future__ import annotations

from typing import Any

import numpy as np

from jaxserve.engine.sequence import Sequence
from jaxserve.types import Event, FinishReason, Request, Timeline, TokenLogprobs


def token_event(seq: Sequence, now: float, token_id: int, text: str, **figures: Any) -> Event:
    """One more token of a request that goes on; `figures` are those of `figures_of`."""
    return Event(
        seq.request.request_id, now, (token_id,), text, None, None, None,
        seq.num_prompt, len(seq.output_ids), seq.num_hit, None, **figures,
    )  # fmt: skip


def last_event(
    request: Request,
    seq: Sequence | None,  # None: the scheduler never saw it
    reason: FinishReason,
    now: float,
    *,
    token_ids: tuple[int, ...] = (),
    text: str = "",
    stop_reason: str | int | None = None,
    error: str | None = None,
    logprobs: tuple[TokenLogprobs, ...] = (),
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None,
    embedding: np.ndarray | None = None,
) -> Event:
    """The end of a request."""
    if seq is None:
        timeline = Timeline(request.arrival_s, finished_s=now)
    else:
        timeline = Timeline(request.arrival_s, seq.admitted_s, seq.first_token_s, seq.last_token_s, now)
    return Event(
        request.request_id,
        now,
        token_ids,
        text,
        reason,
        stop_reason,
        error,
        num_prompt_tokens=len(request.prompt_ids),
        num_output_tokens=0 if seq is None else min(len(seq.output_ids), request.params.max_tokens),
        num_cached_tokens=0 if seq is None else seq.num_hit,
        timeline=timeline,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        embedding=embedding,
    )


def figures_of(seq: Sequence) -> dict[str, Any]:
    """The log-probabilities that go with the id just read, as far as the request asked for any."""
    params = seq.request.params
    figures: dict[str, Any] = {}
    if params.logprobs is not None and params.max_tokens:
        figures["logprobs"] = (seq.last_logprobs,)
    if params.prompt_logprobs is not None and len(seq.output_ids) == 1:
        figures["prompt_logprobs"] = (None, *seq.prompt_logprobs)
        seq.prompt_logprobs = []
    return figures
