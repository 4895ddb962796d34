"""What shaped logits are, worked out id by id in float64 from a request's own words."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from jaxserve.types import SamplingParams


def shaped(
    logits: np.ndarray,
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    end_ids: Collection[int] = (),
    allowed_by_grammar: Collection[int] | None = None,
) -> np.ndarray:
    """`logits` [V] of the token after prompt and output. What must not be picked is -inf.

    Where that leaves nothing, what bad words and min_tokens forbid may be picked after all.
    """
    x = logits.astype(np.float64)
    for token_id, bias in params.logit_bias:
        x[token_id] += bias
    for token_id in {*prompt, *output}:
        r = params.repetition_penalty
        x[token_id] = x[token_id] / r if x[token_id] > 0 else x[token_id] * r
    for token_id in set(output):
        x[token_id] -= params.frequency_penalty * list(output).count(token_id) + params.presence_penalty
    forbidden = np.zeros(len(x), bool)
    for word in params.bad_words:
        before = list(word[:-1])
        if list(output)[len(output) - len(before) :] == before and len(before) <= len(output):
            forbidden[word[-1]] = True
    if len(output) < params.min_tokens:
        forbidden[list(end_ids)] = True
    allowed = np.ones(len(x), bool)
    for ids in (params.allowed_token_ids, allowed_by_grammar):
        if ids is not None:
            allowed &= np.isin(np.arange(len(x)), list(ids))
    if (allowed & ~forbidden).any():
        x[~allowed | forbidden] = -np.inf
    else:
        x = np.where(allowed, 0.0, -np.inf)
    return x


def probabilities(x: np.ndarray, temperature: float = 1.0) -> np.ndarray:
    """The distribution over ids that logits stand for; -1e30 is as good as -inf."""
    weights = np.exp((x.astype(np.float64) - x.max()) / temperature)
    return weights / weights.sum()
