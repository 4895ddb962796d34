from __future__ import annotations

import json
import random
import re
import threading
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.errors import ConfigError, GrammarError, RequestError
from jaxserve.grammar import compiler as compiling
from jaxserve.grammar import spec as specs
from jaxserve.grammar.compiler import GrammarCompiler
from jaxserve.grammar.spec import GrammarSpec
from jaxserve.types import GrammarState
from tests.fakes import BOS, EOS, TURN, FakeTokenizer
from tests.grammar.walking import allowed, walk

TOKENIZER = FakeTokenizer()
V = TOKENIZER.vocab_size + 7  # some padded rows
ENDS = frozenset({EOS, TURN})
COMPILER = GrammarCompiler(TOKENIZER, V, ENDS)


def follows(spec: GrammarSpec, text: str) -> GrammarState | None:
    """The state after `text`, if the grammar of `spec` lets it pass."""
    state = COMPILER.compile(spec).start()
    for token_id in TOKENIZER.encode(text, parse_special=False):
        if token_id not in allowed(state, V):
            return None
        state.advance(token_id)
    return state


def accepts(spec: GrammarSpec, text: str) -> bool:
    state = follows(spec, text)
    return state is not None and set(allowed(state, V)) >= ENDS


SMALL_SCHEMAS = st.recursive(
    st.sampled_from([
        {"type": "integer", "minimum": -20, "maximum": 300},
        {"type": "boolean"},
        {"type": "null"},
        {"type": "string", "maxLength": 5},
        {"type": "string", "pattern": "^[a-c]{1,3}$"},
        {"enum": ["x", 1, None, "é"]},
        {"const": "fixed"},
        {"type": "number", "minimum": 0, "maximum": 1},
    ]),
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("array"), "items": inner, "minItems": st.just(1), "maxItems": st.just(2)}
        ),
        st.lists(st.tuples(st.sampled_from(["a", "b", "ключ"]), inner, st.booleans()), max_size=3).map(
            lambda properties: {
                "type": "object",
                "properties": {name: schema for name, schema, _ in properties},
                "required": sorted({name for name, _, needed in properties if needed}),
                "additionalProperties": False,
            }
        ),
        st.lists(inner, min_size=1, max_size=2).map(lambda options: {"anyOf": options}),
    ),
    max_leaves=5,
)


@settings(max_examples=40)
@given(SMALL_SCHEMAS, st.randoms(use_true_random=False))
def test_whatever_is_picked_parses_and_validates(schema: Any, rng: random.Random):
    ids = walk(COMPILER.compile(specs.json_schema(schema, "x")), V, ENDS, rng)
    if ids is not None:
        jsonschema.validate(json.loads(TOKENIZER.decode(ids, skip_special=False)), schema)


@given(st.sampled_from([r"[ab]{2,4}", r"^[0-9]{1,3}$", r"(?i)yes|no", r"a/b\\", "é+x", r"x\$"]),
       st.randoms(use_true_random=False))  # fmt: skip
@settings(max_examples=30)
def test_whatever_is_picked_matches_the_whole_regex(pattern: str, rng: random.Random):
    ids = walk(COMPILER.compile(specs.regex(pattern, "x")), V, ENDS, rng)
    if ids is not None:
        assert re.fullmatch(pattern, TOKENIZER.decode(ids, skip_special=False))


@given(st.lists(st.text(min_size=1, max_size=6), min_size=1, max_size=5), st.randoms(use_true_random=False))
@settings(max_examples=15)
def test_whatever_is_picked_is_one_of_the_choices(options: list[str], rng: random.Random):
    spec = specs.choice(options, "x")
    ids = walk(COMPILER.compile(spec), V, ENDS, rng)
    assert ids is not None
    assert TOKENIZER.decode(ids, skip_special=False) in options
    assert all(accepts(spec, option) for option in options)


def test_every_character_can_stand_in_a_choice():
    # Every one that a notation could treat as its own, and the ends of each length in UTF-8.
    others = (0x7FF, 0x800, 0x2028, 0x2029, 0xFEFF, 0xFFFD, 0xFFFF, 0x10000, 0x1F642, 0x10FFFF)
    characters = [chr(i) for i in (*range(1, 0xA2), *others)]
    assert accepts(specs.choice(["".join(characters)], "x"), "".join(characters))
    assert accepts(specs.choice(characters, "x"), "\x7f")


def test_thousands_of_choices_are_no_burden():
    spec = specs.choice([f"name-{i}" for i in range(specs.MAX_CHOICES)], "x")
    assert accepts(spec, "name-4095")
    assert not accepts(spec, "name-4096")


def test_grammars_are_read_in_both_notations():
    lark = specs.grammar('start: "a" N\nN: /[0-9]+/', "x")
    gbnf = specs.grammar('root ::= "a" [0-9]+', "x")
    for spec in (lark, gbnf):
        assert accepts(spec, "a12")
        assert follows(spec, "b") is None
        assert not accepts(spec, "a")


def test_any_json_object_is_an_object_without_an_endless_run_of_blanks():
    spec = specs.json_object("x")
    assert accepts(spec, '{"a": [1, {"b": null}],\n    "c": "\\n"}')
    assert follows(spec, "[") is None
    assert follows(spec, " ") is None
    assert follows(spec, "{" + " " * 64) is not None
    assert follows(spec, "{" + " " * 65) is None


def test_special_and_padded_ids_are_never_text():
    """In a string any text may come, "<bos>" too, but spelled in letters."""
    state = follows(specs.json_object("x"), '{"')
    assert state is not None
    may = set(allowed(state, V))
    assert not may & {BOS, EOS, TURN, *range(TOKENIZER.vocab_size, V)}
    assert accepts(specs.json_object("x"), '{"a":"<bos>"}')


def test_at_the_end_the_end_ids_alone_are_allowed_and_each_of_them_counts():
    state = follows(specs.regex("ab", "x"), "ab")
    assert state is not None
    assert state.is_complete
    for end in (EOS, TURN, EOS):
        assert allowed(state, V) == [EOS, TURN]
        state.advance(end)


def test_an_end_id_in_the_middle_ends_the_answer_where_the_grammar_may_end():
    state = follows(specs.regex("a+", "x"), "a")
    assert state is not None
    assert not state.is_complete
    assert {EOS, TURN, 3 + ord("a")} <= set(allowed(state, V))
    state.advance(TURN)
    assert state.is_complete
    assert allowed(state, V) == [EOS, TURN]


def test_an_id_that_was_not_allowed_is_an_error_and_not_an_answer():
    state = COMPILER.compile(specs.regex("ab", "x")).start()
    with pytest.raises(GrammarError):
        state.advance(3 + ord("b"))


def test_answers_of_one_grammar_stand_each_for_itself():
    grammar = COMPILER.compile(specs.regex("a|bc", "x"))
    first, second = grammar.start(), grammar.start()
    first.advance(3 + ord("b"))
    assert allowed(first, V) == [3 + ord("c")]
    assert 3 + ord("a") in allowed(second, V)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: specs.json_schema({"type": "foo"}, "f"), "foo"),
        (lambda: specs.json_schema({"type": "string", "pattern": "(a"}, "f"), "unclosed group"),
        (lambda: specs.json_schema({"type": "object", "unevaluatedItems": False}, "f"), "unevaluatedItems"),
        (lambda: specs.json_schema(
            {"type": "object", "unevaluatedProperties": False, "x-guidance": {"lenient": True}}, "f"
        ), "unevaluatedProp"),
        (lambda: specs.json_schema({"$ref": "http://example.com/x"}, "f"), "example.com"),
        (lambda: specs.json_schema([], "f"), "must be a JSON Schema"),
        (lambda: specs.json_schema("{", "f"), "no JSON"),
        (lambda: specs.regex("(a", "f"), "unclosed group"),
        (lambda: specs.regex("a" * (specs.MAX_GRAMMAR_CHARS + 1), "f"), "at most"),
        (lambda: specs.json_schema({"oneOf": [{"minItems": i} for i in range(2000)]}, "f"), "can't"),
        (lambda: specs.choice([], "f"), "at least one"),
        (lambda: specs.choice(["a", ""], "f"), "empty"),
        (lambda: specs.choice(["a"] * 5000, "f"), "4096"),
        (lambda: specs.grammar("start: foo", "f"), "foo"),
        (lambda: specs.grammar("root ::= (((", "f"), "no valid grammar"),
        (lambda: specs.grammar("root ::= " + "(" * 100_000, "f"), "nested too deeply"),
        (lambda: specs.grammar("", "f"), "no valid grammar"),
        (lambda: specs.grammar('{"grammars": []}', "f"), "no valid grammar"),
    ],
)  # fmt: skip
def test_what_can_t_be_compiled_is_refused_with_field_and_reason(make: Any, reason: str):
    with pytest.raises(RequestError, match=re.escape(reason)) as caught:
        COMPILER.compile(make())
    assert caught.value.status == 400
    assert caught.value.param == "f"
    assert len(caught.value.message) < 1000
    assert "\n" not in caught.value.message


def test_a_grammar_is_compiled_once_however_many_ask_at_the_same_time(monkeypatch: pytest.MonkeyPatch):
    compiler = GrammarCompiler(TOKENIZER, V)
    gate = threading.Event()
    read = compiler._read_vocabulary
    monkeypatch.setattr(compiler, "_read_vocabulary", lambda: (gate.wait(30), read())[1])
    futures = [compiler.submit(specs.regex("ab", "x")) for _ in range(5)]
    assert not any(future.done() for future in futures)
    gate.set()
    assert len({id(future.result()) for future in futures}) == 1
    assert compiler.num_compiled == 1


def test_the_grammar_used_longest_ago_is_forgotten_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiling, "MAX_KEPT", 2)
    compiler = GrammarCompiler(TOKENIZER, V)
    for pattern in ("a", "b", "a", "c", "a", "b"):
        compiler.compile(specs.regex(pattern, "x"))
    assert compiler.num_compiled == 4  # a, b, c, and b once more


def test_a_model_without_an_end_id_is_refused_by_name():
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        GrammarCompiler(TOKENIZER, V, ()).compile(specs.regex("a", "x"))
