"""Answers by a grammar over a real runner: each is what a plain NumPy decoder picks of what is allowed."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jsonschema
import numpy as np
import pytest

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.grammar import spec as specs
from jaxserve.grammar.compiler import GrammarCompiler
from jaxserve.ops.backend import XLA
from jaxserve.runtime.runner import ModelRunner
from jaxserve.types import Event, Request, SamplingParams
from tests.grammar.walking import allowed
from tests.models import numpy_decoder
from tests.models.tiny import VOCAB
from tests.runtime.conftest import Tiny

CONFIG = EngineConfig(
    max_model_len=64, num_pages=26, page_size=4, max_num_seqs=3, max_prefill_tokens=30,
    decode_buckets=(3,), prefill_buckets=((3, 10),),
)  # fmt: skip
EOS = 0
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yz", 1]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


class CharTokenizer:
    """One character an id, the first of them the end of a text."""

    CHARS = '$ {}[]":,.-+_\n0123456789abcdefghijklmnopqrstuvwxyz'[:VOCAB]
    vocab_size, bos_id, eos_id, add_bos = len(CHARS), None, EOS, False
    eos_ids = frozenset({EOS})

    def encode(self, text: str, *, add_bos: bool = False, parse_special: bool = True) -> list[int]:
        return [self.CHARS.index(char) for char in text if char in self.CHARS]

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        return "".join(self.CHARS[i] for i in ids if i or not skip_special)

    def token_bytes(self, token_id: int) -> bytes:
        return self.CHARS[token_id].encode()

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS

    def token_text(self, token_id: int) -> str:
        return self.CHARS[token_id]


TOKENIZER: Any = CharTokenizer()
COMPILER = GrammarCompiler(TOKENIZER, VOCAB)


def alone(tiny: Tiny, request: Request) -> list[int]:
    """The greedy answer, worked out without an engine."""
    ids, state = list(request.prompt_ids), request.grammar.start() if request.grammar else None
    for _ in range(request.params.max_tokens):
        logits = numpy_decoder.logits(tiny.hf_config, tiny.hf_tensors, ids)[-1]
        options = list(range(VOCAB)) if state is None else allowed(state, VOCAB)
        ids.append(max(options, key=lambda i: logits[i]))
        if ids[-1] == EOS:
            break
        if state is not None:
            state.advance(ids[-1])
            if state.is_complete:
                break
    return ids[len(request.prompt_ids) :]


@pytest.fixture(scope="module", params=[1, 4])
def runner(llama: Tiny, request: pytest.FixtureRequest) -> ModelRunner:
    """With several decode steps a launch, those without a grammar take them once they are alone."""
    return llama.runner(replace(CONFIG, decode_steps=request.param), XLA)


def serve(runner: ModelRunner, requests: Sequence[Request]) -> dict[str, tuple[list[int], str, str]]:
    events: list[Event] = []
    engine = Engine(runner.config, runner, TOKENIZER, deliver=events.extend, vocab_size=VOCAB)
    engine.start(in_thread=False)
    for request in requests:
        engine.submit(request)
    while engine.turn():
        pass
    answers: dict[str, tuple[list[int], str, str]] = {}
    for event in events:
        ids, text, _ = answers.get(event.request_id, ([], "", ""))
        answers[event.request_id] = ([*ids, *event.token_ids], text + event.text, event.finish_reason or "")
    return answers


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_by_a_grammar_stand_beside_others_on_the_device(
    llama: Tiny, runner: ModelRunner, temperature: float
):
    rng = np.random.default_rng(3)
    schema = COMPILER.compile(specs.json_schema(SCHEMA, "x"))
    grammars = [schema, None, COMPILER.compile(specs.regex("[a-f]{3,12}", "x")), schema, None]
    requests = [
        Request(
            str(n),
            tuple(rng.integers(1, VOCAB, size=int(rng.integers(1, 24))).tolist()),
            SamplingParams(30, temperature=temperature, seed=n),
            arrival_s=0.0,
            grammar=grammar,
        )
        for n, grammar in enumerate(grammars)
    ]
    answers = serve(runner, requests)
    for request in requests:
        ids, text, reason = answers[request.request_id]
        if temperature == 0:
            assert ids == alone(llama, request)
        if request.grammar is schema and reason == "stop":
            jsonschema.validate(json.loads(text), SCHEMA)
        assert reason in ("stop", "length")
    free = [request for request in requests if request.grammar is None]
    assert {r.request_id: answers[r.request_id] for r in free} == serve(runner, free)
