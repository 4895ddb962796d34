"""Trial compilations in a process of their own, which the kernel ends when one is too costly.

What llguidance counts as fuel does not cover all of its work: to intersect some dozens of patterns takes
minutes, and thousands of rules that lead to each other overflow its stack. Neither can be stopped or caught.
So a grammar is compiled here first, for the bytes and special tokens of the vocabulary alone. Grammars in
llama.cpp's notation (GBNF) are translated here too, by Python code that takes a minute and more for some.

Run as a module this is that process. It answers each line with one line.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any, Literal

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from jaxserve.errors import GrammarError

ANY_NOTATION: Literal["any_grammar"] = "any_grammar"  # Lark's or llama.cpp's
MEMORY_BYTES = 2 << 30  # of address space
STACK_BYTES = 4 << 20  # less than the threads of the server have, who compile what passes here


class TrialProcess:
    """Owned by one thread at a time. The process begins with the first trial, and anew after one was ended.

    `specials` are the special tokens' ids and texts, which a grammar may refer to.
    """

    def __init__(
        self,
        limits: dict[str, Any],
        cpu_s: float,
        *,
        vocab_size: int,
        eos_ids: list[int],
        specials: list[tuple[int, str]],
    ):
        self._cpu_s = cpu_s
        self._setting = json.dumps([limits, cpu_s, vocab_size, eos_ids, specials])
        self._process: subprocess.Popen[str] | None = None
        # Ends the process; called when this object or the interpreter goes, too.
        self._end: Callable[[], object] = lambda: None

    def check(self, source: str) -> str:
        """`source` in llguidance's own format, where it may have had `ANY_NOTATION` for "lark_grammar".

        Raises GrammarError, which says why it can't be compiled. Takes little more than `cpu_s` of processor
        time. Raises RuntimeError if there can be no process.
        """
        if self._process is None:
            self._process = self._begin()
        answer = _exchange(self._process, json.dumps(source))
        if answer:
            translated, reason = json.loads(answer)
            if reason:
                raise GrammarError(reason)
            return translated
        is_late = self._process.wait() == -signal.SIGPROF
        self.close()
        if is_late:
            raise GrammarError(
                f"that takes more than {self._cpu_s:g} s of processor time; make it smaller, with fewer "
                "patterns"
            )
        raise GrammarError("it is nested too deeply, or takes too much memory; make it smaller")

    def close(self) -> None:
        self._process = None
        self._end()

    def _begin(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", __name__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # where what panics says so, and quotes the grammar
            encoding="utf-8",
            start_new_session=True,  # Ctrl-C is for the server, which lets running requests end
        )
        self._end = weakref.finalize(self, _end, process)
        if _exchange(process, self._setting) != "ready\n":
            self._end()
            raise RuntimeError(f"the process that tries grammars does not start: {process.args!r}")
        return process


def _exchange(process: subprocess.Popen[str], line: str) -> str:
    """The process' answer to `line`; empty once it has ended."""
    assert process.stdin is not None
    assert process.stdout is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(line + "\n")
        process.stdin.flush()
    return process.stdout.readline()


def _end(process: subprocess.Popen[str]) -> None:
    process.kill()
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # what was not written yet
            assert pipe is not None
            pipe.close()
    process.wait()


class _Bytes:
    """A vocabulary, as `LLTokenizer` asks for it: the bytes come behind the ids of the model's vocabulary."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, vocab_size: int, eos_ids: list[int], specials: list[tuple[int, str]]):
        self.eos_token_id = eos_ids[0]
        self.tokens = [b""] * vocab_size + [bytes([i]) for i in range(256)]
        for token_id, text in specials:
            self.tokens[token_id] = text.encode()
        self.special_token_ids = list(range(vocab_size))
        self._first = vocab_size

    def __call__(self, text: str) -> list[int]:
        return [self._first + byte for byte in text.encode()]


def _try_all() -> None:
    limits, cpu_s, vocab_size, eos_ids, specials = json.loads(sys.stdin.readline())
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(OSError, ValueError):  # not every system can
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    source: Any = _Bytes(vocab_size, eos_ids, specials)
    vocabulary = LLTokenizer(source, n_vocab=len(source.tokens), eos_token=eos_ids)
    print("ready", flush=True)
    for line in sys.stdin:
        # Nobody handles the signal: the kernel ends the process, in whatever code it is.
        signal.setitimer(signal.ITIMER_PROF, cpu_s)
        try:
            grammar = _translated(json.loads(line))
        except ValueError as error:
            answer = "", str(error)
        else:
            matcher = LLMatcher(vocabulary, grammar, log_level=0, limits=LLParserLimits(**limits))
            if not matcher.is_error():
                matcher.compute_bitmask()
            answer = grammar, matcher.get_error()
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(answer), flush=True)


def _translated(source: str) -> str:
    """Raises ValueError."""
    parts = json.loads(source)["grammars"]
    for part in parts:
        if (text := part.pop(ANY_NOTATION, None)) is not None:
            try:
                part["lark_grammar"] = any_to_lark(text)
            except Exception as error:  # the converter raises what its parser meets
                reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
                raise ValueError(f"no valid grammar: {reason}") from None
    return json.dumps({"grammars": parts})


if __name__ == "__main__":
    threading.stack_size(STACK_BYTES)
    threading.Thread(target=_try_all).start()
