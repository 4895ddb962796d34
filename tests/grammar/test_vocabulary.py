"""Both real vocabularies as grammars see them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.grammar import spec as specs
from jaxserve.grammar.compiler import GrammarCompiler
from jaxserve.grammar.vocabulary import ll_tokenizer
from jaxserve.tokenizer import load
from jaxserve.weights.gguf import GGUFSource

TEXTS = (
    "Hello, world", '{"name": "get_weather", "arguments": {"city": "Paris"}}', " leading", "trailing \n\n",
    "naïve Ünï©ödé 🙂👩‍👩‍👧 中文", "\t\ttabs\r\n", "12345.6e-7", "<tool_call>\n{}\n</tool_call>", "a", "",
)  # fmt: skip


@pytest.fixture(scope="module", params=["smollm2_gguf", "gemma3_gguf"])
def real(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    """Our tokenizer, and the one made of it."""
    path: Path = request.getfixturevalue(request.param)
    tokenizer = load.from_gguf(GGUFSource(path).metadata)
    return tokenizer, ll_tokenizer(tokenizer, tokenizer.vocab_size + 5, tokenizer.eos_ids)


def test_every_id_has_its_bytes(real):
    tokenizer, made = real
    assert made.vocab_size == tokenizer.vocab_size + 5
    assert sorted(made.eos_tokens) == sorted(tokenizer.eos_ids)
    for i in range(made.vocab_size):
        # The byte 0xFF never stands in UTF-8, and is what llguidance marks special tokens with.
        is_text = not tokenizer.is_special(i) and tokenizer.token_bytes(i) not in (b"", b"\xff")
        assert made.is_special_token(i) != is_text
        assert not is_text or made.decode_bytes([i]) == tokenizer.token_bytes(i)


@pytest.mark.parametrize("text", TEXTS)
def test_texts_become_the_ids_that_our_tokenizer_gives(real, text):
    tokenizer, made = real
    ids = tokenizer.encode(text, parse_special=False)
    assert made.tokenize_str(text) == ids
    assert made.decode_bytes(ids) == b"".join(map(tokenizer.token_bytes, ids))


def test_half_a_character_is_spelled_in_bytes(real):
    tokenizer, made = real
    whole = "é🙂".encode()
    for end in range(len(whole)):
        ids = made.tokenize_bytes(whole[:end])
        assert b"".join(map(tokenizer.token_bytes, ids)).strip() == whole[:end]


def test_the_ids_of_a_json_text_pass_its_grammar_and_others_don_t(real):
    """As our tokenizer splits it: no boundary of a token is in the way of a grammar."""
    tokenizer, made = real
    V = made.vocab_size
    value = {"city": "Zürich 🙂", "days": [1, 22], "ok": True}
    schema = {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "array", "items": {"type": "integer"}},
        "ok": {"type": "boolean"},
    }, "required": ["city", "days", "ok"], "additionalProperties": False}  # fmt: skip
    state = GrammarCompiler(tokenizer, V).compile(specs.json_schema(schema, "x")).start()
    text = json.dumps(value, ensure_ascii=False)
    ids = tokenizer.encode(text, parse_special=False)
    if tokenizer.token_bytes(ids[0])[:1] == b" ":  # the space that some models put before a text
        ids = ids[1:] if tokenizer.token_bytes(ids[0]) == b" " else pytest.skip("no id begins with {")
    special = [i for i in range(V) if made.is_special_token(i) and i not in tokenizer.eos_ids]
    words = np.zeros(-(-V // 32), np.int32)
    for token_id in ids:
        state.fill(words)
        bits = np.unpackbits(words.view(np.uint8), bitorder="little")
        assert bits[token_id], tokenizer.token_text(token_id)
        assert not bits[special].any()
        state.advance(token_id)
    state.fill(words)
    bits = np.unpackbits(words.view(np.uint8), bitorder="little")
    assert state.is_complete
    assert np.nonzero(bits)[0].tolist() == sorted(tokenizer.eos_ids)
