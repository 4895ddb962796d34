"""Grammars compiled on threads of their own, bounded in size, time and number, and kept for the next."""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from jaxserve.errors import GrammarError, QueueFullError, RequestError
from jaxserve.grammar.matcher import CompiledGrammar
from jaxserve.grammar.spec import GrammarSpec, Part
from jaxserve.grammar.trial import TrialProcess
from jaxserve.grammar.vocabulary import ll_tokenizer
from jaxserve.tokenizer.base import Tokenizer

MAX_KEPT = 128  # grammars
MAX_WAITING = 32  # grammars that are neither compiled nor refused yet
MAX_ERROR_CHARS = 400
NUM_THREADS = 2
TRIAL_CPU_S = 2.0
# Fuel, not seconds: the same grammar is refused everywhere. As measured by llguidance's authors, the first
# is some 20 ms of work and the second 7 ms; a lexer state takes 1 - 2 kB. Items of ambiguous grammars cost
# far more than the authors say: with these limits a mask for 262k tokens took up to 80 ms, with 50000 items
# in a step up to 0.7 s, and with 20000 of them in a row 5 s.
LIMITS: dict[str, Any] = {
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 10_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "max_items_in_row": 2_000,
    "verbose_errors": False,  # which would quote the answer and the grammar
}


class GrammarCompiler:
    """Safe to use from several threads. The vocabulary is read at the first grammar.

    Equal sources are compiled once, also when they come at the same time; refusals are remembered as well.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Iterable[int] | None = None):
        ends = sorted(tokenizer.eos_ids if eos_ids is None else eos_ids)
        self._read_vocabulary = partial(ll_tokenizer, tokenizer, vocab_size, ends)
        self._new_trial = partial(new_trial, tokenizer, vocab_size, ends)
        self._vocabulary: LLTokenizer | None = None
        self._lock = threading.Lock()  # over what is kept; never held while compiling
        self._reading = threading.Lock()
        self._kept: OrderedDict[tuple[Part, ...], Future[CompiledGrammar]] = OrderedDict()
        self._pool: ThreadPoolExecutor | None = None
        self._trials = threading.local()  # each thread has a process of its own
        self._num_waiting = 0
        self._mean_s = 0.0  # that the last ones took
        self.num_compiled = 0

    def submit(self, spec: GrammarSpec) -> Future[CompiledGrammar]:
        """The compiled grammar to come; it fails with GrammarError, whose text is the compiler's reason.

        The future may belong to several requests: nobody may cancel it. Raises RequestError if the sources
        are too long, QueueFullError if too many wait.
        """
        spec.check_size()
        with self._lock:
            if (found := self._kept.get(spec.parts)) is not None:
                self._kept.move_to_end(spec.parts)
                return found
            if self._num_waiting >= MAX_WAITING:
                raise QueueFullError(
                    f"{self._num_waiting} grammars wait to be compiled, as many as may, and '{spec.param}' "
                    "needs one more. Try again later, or use a grammar that was used lately.",
                    code="grammar_queue_full",
                    retry_after_s=max(1, math.ceil(self._num_waiting * self._mean_s / NUM_THREADS)),
                )
            if self._pool is None:
                self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="jaxserve-grammar")
            self._num_waiting += 1
            made = self._kept[spec.parts] = self._pool.submit(self._compile, spec)
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
            return made

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """The same, at once. Raises RequestError."""
        try:
            return self.submit(spec).result()
        except GrammarError as error:
            raise refusal(error, spec.param) from None

    def _compile(self, spec: GrammarSpec) -> CompiledGrammar:
        began_s = time.monotonic()
        try:
            return self._compiled(spec.source)
        except GrammarError:
            raise
        except Exception:  # it is not the grammar's fault, and may go better the next time
            with self._lock:
                self._kept.pop(spec.parts, None)
            raise
        finally:
            with self._lock:
                self._num_waiting -= 1
                self._mean_s += (time.monotonic() - began_s - self._mean_s) / 8

    def _compiled(self, source: str) -> CompiledGrammar:
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary()
        self.num_compiled += 1
        if not hasattr(self._trials, "own"):
            self._trials.own = self._new_trial()
        source = self._trials.own.check(source)
        matcher = LLMatcher(self._vocabulary, source, log_level=0, limits=LLParserLimits(**LIMITS))
        # Over the limits in its first step, or in that of each answer, which begins with a copy: refused.
        for one in (matcher, matcher.deep_copy()):
            one.compute_bitmask()
            if one.is_error():
                raise GrammarError(one.get_error())
        return CompiledGrammar(matcher)


def new_trial(tokenizer: Tokenizer, vocab_size: int, eos_ids: list[int]) -> TrialProcess:
    specials = [(i, tokenizer.token_text(i)) for i in range(vocab_size) if tokenizer.is_special(i)]
    return TrialProcess(LIMITS, TRIAL_CPU_S, vocab_size=vocab_size, eos_ids=eos_ids, specials=specials)


def refusal(error: GrammarError, param: str) -> RequestError:
    """What the client is told: the compiler's reason, on one line."""
    reason = " ".join(str(error).replace("<non-verbose/>", "").split())[:MAX_ERROR_CHARS]
    return RequestError(f"'{param}' can't be compiled: {reason}", param=param, code="invalid_grammar")
