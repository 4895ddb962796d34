"""Grammars compiled on threads of their own, bounded in size and time, and kept for the next request."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from jaxserve.errors import GrammarError, RequestError
from jaxserve.grammar.matcher import CompiledGrammar
from jaxserve.grammar.spec import GrammarSpec
from jaxserve.grammar.vocabulary import ll_tokenizer
from jaxserve.tokenizer.base import Tokenizer

MAX_KEPT = 128  # grammars
MAX_ERROR_CHARS = 400
NUM_THREADS = 2
# Fuel, not seconds: the same grammar is refused everywhere. As measured by llguidance's authors, the first
# is some 20 ms of work, the second 7 ms and the third 3 ms; a lexer state takes 1 - 2 kB.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "max_items_in_row": 20_000,
}


class GrammarCompiler:
    """Safe to use from several threads. The vocabulary is read at the first grammar.

    Equal sources are compiled once, also when they come at the same time; refusals are remembered as well.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int] | None = None):
        self._read_vocabulary = partial(
            ll_tokenizer, tokenizer, vocab_size, tokenizer.eos_ids if eos_ids is None else eos_ids
        )
        self._vocabulary: LLTokenizer | None = None
        self._lock = threading.Lock()  # over what is kept; never held while compiling
        self._reading = threading.Lock()
        self._kept: OrderedDict[str, Future[CompiledGrammar]] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None
        self.num_compiled = 0

    def submit(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """The compiled grammar to come; it fails with GrammarError, whose text is the compiler's reason.

        The future may belong to several requests: nobody may cancel it.
        """
        source = spec.source
        with self._lock:
            if (found := self._kept.get(source)) is not None:
                self._kept.move_to_end(source)
                return found
            if self._pool is None:
                self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="jaxserve-grammar")
            made = self._kept[source] = self._pool.submit(self._compile, source)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return made

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """The same, at once. Raises RequestError."""
        try:
            return self.submit(spec).result()
        except GrammarError as error:
            raise refusal(error, spec.param) from None

    def _compile(self, source: str) -> CompiledGrammar:
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
        self.num_compiled += 1
        matcher = LLMatcher(self._vocabulary, source, log_level=0, limits=LLParserLimits(**LIMITS))
        matcher.compute_bitmask()  # a grammar whose first step is over the limits is refused here
        if matcher.is_error():
            raise GrammarError(matcher.get_error())
        return CompiledGrammar(matcher)


def refusal(error: GrammarError, param: str) -> RequestError:
    """What the client is told: the compiler's reason, on one line."""
    reason = " ".join(str(error).split())[:MAX_ERROR_CHARS]
    return RequestError(f"'{param}' can't be compiled: {reason}", param=param, code="invalid_grammar")
