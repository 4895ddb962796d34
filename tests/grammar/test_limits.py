"""Grammars made to cost much: each is refused, or ends its own answer, and the next is compiled as ever."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from jaxserve.errors import GrammarLimitError, QueueFullError, RequestError
from jaxserve.grammar import compiler as compiling
from jaxserve.grammar import spec as specs
from jaxserve.grammar.compiler import GrammarCompiler
from jaxserve.grammar.spec import GrammarSpec
from tests.fakes import EOS, TURN, FakeTokenizer
from tests.grammar.walking import allowed

TOKENIZER = FakeTokenizer()
V = TOKENIZER.vocab_size + 7
LETTERS = "abcdefghijklmnopqrst"


@pytest.fixture(scope="module")
def compiler() -> Iterator[GrammarCompiler]:
    """One for all tests here, so that each begins with what those before it have left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiling, "TRIAL_CPU_S", 0.5)
        yield GrammarCompiler(TOKENIZER, V)


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


def chain(length: int, rule: str) -> str:
    """Rules r0, r1... each of which refers to the next."""
    rules = [f"r{i}: {rule.replace('NEXT', f'r{i + 1}')}" for i in range(length)]
    return "\n".join(["start: r0", *rules, f'r{length}: "x" |'])


def properties(count: int) -> dict[str, Any]:
    return {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(count)}}


PATTERNS = [f"a.{{{i}}}b" for i in range(60)]
HOSTILE: dict[str, tuple[Callable[[], GrammarSpec], str]] = {
    "patterns of one string": (
        lambda: specs.json_schema({"allOf": [{"type": "string", "pattern": p} for p in PATTERNS]}, "f"),
        "processor time",
    ),
    "patterns of one terminal": (
        lambda: specs.grammar('start: "a" T\nT: ' + " & ".join(f"/.*{p}.*/" for p in PATTERNS), "f"),
        "processor time",
    ),
    "rules in a row": (lambda: specs.grammar(chain(9000, '"a" NEXT | NEXT?'), "f"), "nested too deeply"),
    "rules that may be empty": (lambda: specs.grammar(chain(9000, "NEXT NEXT"), "f"), "nested too deeply"),
    "properties": (lambda: specs.json_schema(properties(8000), "f"), "processor time"),
    "blank lines of GBNF": (lambda: specs.grammar('root ::= "a"' + " \n" * 60_000, "f"), "processor time"),
    "a deep schema": (lambda: specs.json_schema(nested(200), "f"), "recursion limit"),
    "parentheses": (lambda: specs.regex("(" * 500 + "a" + ")?" * 500, "f"), "invalid regex"),
    "multiples": (
        lambda: specs.json_schema({"type": "integer", "multipleOf": 982_451_653, "minimum": 0}, "f"), "fuel"
    ),
    "branches of allOf": (
        lambda: specs.json_schema(
            {"type": "object",
             "allOf": [{"anyOf": [{"minProperties": i}, properties(1)]} for i in range(30)]}, "f"
        ),
        "too large",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HOSTILE)
def test_what_costs_too_much_to_compile_is_refused_and_the_next_is_compiled(
    compiler: GrammarCompiler, name: str
):
    make, reason = HOSTILE[name]
    with pytest.raises(RequestError, match=reason) as caught:
        compiler.compile(make())
    assert (caught.value.status, caught.value.param) == (400, "f")
    state = compiler.compile(specs.choice([name], "f")).start()  # one that was not compiled before
    for token_id in TOKENIZER.encode(name):
        assert token_id in allowed(state, V)
        state.advance(token_id)
    assert state.is_complete


HARMLESS = {
    "nested counts": specs.regex(r"((a{0,50}b{0,50}){0,50}c){0,50}", "f"),
    "states that double": specs.regex("(a|b)*a(a|b){20}", "f"),
    "a big count": specs.regex("(.|\n){0,100000}", "f"),
    "many alternatives": specs.regex("|".join(f"w{i * 7919 % 100_003}[a-z]*x{i}" for i in range(3000)), "f"),
    "a big enum": specs.json_schema({"enum": [f"v{i}" for i in range(20_000)]}, "f"),
    "a schema that refers to itself": specs.json_schema(
        {"type": "object", "properties": {"c": {"type": "array", "items": {"$ref": "#"}}}, "required": ["c"]},
        "f",
    ),
    "hundreds of properties": specs.json_schema(properties(450), "f"),
}  # fmt: skip


@pytest.mark.parametrize("name", HARMLESS)
def test_what_only_looks_costly_is_followed_token_by_token(compiler: GrammarCompiler, name: str):
    state = compiler.compile(HARMLESS[name]).start()
    rng = random.Random(0)
    for _ in range(20):
        options = [i for i in allowed(state, V) if i != EOS]
        if not options:
            break
        state.advance(rng.choice(options))
    assert set(allowed(state, V)), "nothing can follow"


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (specs.grammar(chain(20, "NEXT NEXT | NEXT").replace('"x" |', '"x" | r20 r20 |'), "f"), "items"),
        (specs.regex("(((a{1,30}){1,30}){1,30}){1,30}", "f"), "expressions"),
    ],
)
def test_an_answer_that_can_be_read_in_too_many_ways_ends_by_a_limit(
    compiler: GrammarCompiler, spec: GrammarSpec, reason: str
):
    state = compiler.compile(spec).start()

    def go_on() -> None:
        for _ in range(300):
            state.advance(next(i for i in allowed(state, V) if i not in (EOS, TURN)))

    with pytest.raises(GrammarLimitError, match=reason) as caught:
        go_on()
    assert "\n" not in str(caught.value)


def test_grammars_may_name_special_tokens_and_their_ids(compiler: GrammarCompiler):
    for name in ("<turn>", f"<[{TURN}]>"):
        state = compiler.compile(specs.grammar(f'start: {name} "a"', "f")).start()
        assert allowed(state, V) == [TURN]


def test_a_trial_whose_process_was_killed_is_refused_and_the_next_gets_a_new_one():
    trial = compiling.new_trial(TOKENIZER, V, [EOS])
    source = specs.regex("a", "f").source
    assert trial.check(source)
    assert trial._process is not None
    first = trial._process.pid
    os.kill(first, signal.SIGKILL)
    with pytest.raises(compiling.GrammarError):
        trial.check(source)
    assert trial.check(source)
    assert trial._process.pid != first
    trial.close()


def test_the_processes_end_with_the_compiler():
    trial = compiling.new_trial(TOKENIZER, V, [EOS])
    trial.check(specs.regex("a", "f").source)
    process = trial._process
    assert process is not None
    assert process.poll() is None
    del trial
    assert process.poll() is not None


def test_only_so_many_grammars_may_wait(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiling, "MAX_WAITING", 3)
    compiler = GrammarCompiler(TOKENIZER, V)
    gate, read = threading.Event(), compiler._read_vocabulary
    monkeypatch.setattr(compiler, "_read_vocabulary", lambda: (gate.wait(30), read())[1])
    waiting = [compiler.submit(specs.regex(f"a{{{n}}}", "f")) for n in (1, 2, 3)]
    with pytest.raises(QueueFullError, match="3 grammars wait") as caught:
        compiler.submit(specs.regex("b", "f"))
    assert caught.value.status == 429
    assert caught.value.code == "grammar_queue_full"
    assert caught.value.retry_after_s >= 1
    assert compiler.submit(specs.regex("a{2}", "f")) is waiting[1]
    gate.set()
    for future in waiting:
        future.result(30)
    compiler.compile(specs.regex("b", "f"))


def test_a_failure_that_is_not_the_grammars_is_not_remembered(monkeypatch: pytest.MonkeyPatch):
    compiler = GrammarCompiler(TOKENIZER, V)
    read = compiler._read_vocabulary

    def fail() -> None:
        raise OSError("no memory just now")

    monkeypatch.setattr(compiler, "_read_vocabulary", fail)
    with pytest.raises(OSError, match="just now"):
        compiler.compile(specs.regex("a", "f"))
    monkeypatch.setattr(compiler, "_read_vocabulary", read)
    compiler.compile(specs.regex("a", "f"))


def test_the_parts_of_a_grammar_are_bounded_together(compiler: GrammarCompiler):
    part = "x" * (specs.MAX_GRAMMAR_CHARS // 2)
    spec = GrammarSpec((("main", "lark_grammar", part), ("b", "lark_grammar", part + "x")), "tools")
    with pytest.raises(RequestError, match="together") as caught:
        compiler.submit(spec)
    assert caught.value.param == "tools"
