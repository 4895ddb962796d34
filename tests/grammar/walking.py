"""Answers picked at random from what a grammar allows."""

from __future__ import annotations

import random

import numpy as np

from jaxserve.types import Grammar, GrammarState


def allowed(state: GrammarState, vocab_size: int) -> list[int]:
    """The ids that may come next, by their bits."""
    words = np.zeros(-(-vocab_size // 32), np.int32)
    state.fill(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert not bits[vocab_size:].any(), "an id past the vocabulary is allowed"
    return np.nonzero(bits[:vocab_size])[0].tolist()


def walk(
    grammar: Grammar, vocab_size: int, eos_ids: frozenset[int], rng: random.Random, most: int = 400
) -> list[int] | None:
    """Ids up to the end of an answer, the end-of-sequence id left out; None if `most` don't reach it."""
    state, ids = grammar.start(), []
    for _ in range(most):
        options = allowed(state, vocab_size)
        assert options, "nothing is allowed"
        ends = [i for i in options if i in eos_ids]
        assert ends in ([], sorted(eos_ids)), "of several end-of-sequence ids each counts"
        assert not state.is_complete or len(ends) == len(options)
        if state.is_complete or (ends and rng.random() < 0.3):
            return ids
        ids.append(rng.choice([i for i in options if i not in eos_ids]))
        state.advance(ids[-1])
    return None
