"""Log-probabilities as clients see them, against the fake model's own, whole and streamed."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.errors import RequestError
from jaxserve.server.bridge import _joined
from jaxserve.server.logprobs import completion_logprobs, prompt_entries
from jaxserve.server.openai import Generation, parse_chat, parse_completion
from jaxserve.server.render import renderer
from jaxserve.types import Event, TokenLogprobs
from tests.fakes import BOS, EOS, TURN, FakeModel, FakeRunner, FakeTokenizer
from tests.server.running import MODEL, RunningServer, served_model

TOKENIZER = FakeTokenizer()
SERVED = served_model(tokenizer=TOKENIZER)
CONFIG = EngineConfig(
    max_model_len=256, num_pages=257, page_size=4, max_num_seqs=4,
    max_prefill_tokens=16, min_prefill_queries=16,
)  # fmt: skip
# Whole characters, halves of one, a longer one, a special token, pieces of several characters.
IDS = (*(3 + byte for byte in b"ab\n\xc3\xa9"), 266, 267, TURN, *TOKENIZER.encode("stop🙂"))
MESSAGES: list = [{"role": "user", "content": "hi"}]


def generate(
    path: str, body: dict[str, Any], model: FakeModel
) -> tuple[Generation, list[tuple[int, Event]]]:
    """Every event of an answer, in order, with the index of its request."""
    parse = parse_chat if path == "chat" else parse_completion
    generation = parse(body, SERVED, 0.0)
    indexes = {request.request_id: index for index, request in enumerate(generation.requests)}
    events: list[tuple[int, Event]] = []
    engine = Engine(
        CONFIG, FakeRunner(CONFIG, model), TOKENIZER,
        deliver=lambda some: events.extend((indexes[event.request_id], event) for event in some),
    )  # fmt: skip
    engine.start(in_thread=False)
    for request in generation.requests:
        engine.submit(request)
    while engine.turn():
        pass
    return generation, events


def whole(path: str, body: dict[str, Any], model: FakeModel) -> dict[str, Any]:
    generation, events = generate(path, body, model)
    answer = renderer(generation)
    for index, event in events:
        answer.collect(index, event)
    return json.loads(answer.response(), parse_constant=pytest.fail)


def chunks(path: str, body: dict[str, Any], model: FakeModel, at_once: int = 1) -> list[dict[str, Any]]:
    """The choices of all chunks of a stream whose client takes so many events at a time."""
    generation, events = generate(path, {**body, "stream": True}, model)
    answer = renderer(generation)
    lines = []
    for start in range(0, len(events), at_once):
        for index, event in _joined(events[start : start + at_once]):
            lines += answer.chunks(index, event)
    return [json.loads(line, parse_constant=pytest.fail)["choices"][0] for line in lines]


def ids_of(prompt: str | list[int]) -> list[int]:
    return TOKENIZER.encode(prompt) if isinstance(prompt, str) else prompt


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    text = st.text(st.sampled_from("ab é🙂\n"), min_size=1, max_size=12)
    ids = st.lists(st.sampled_from((*IDS, BOS, EOS)), min_size=1, max_size=24)
    return {
        "prompt": draw(st.one_of(text, ids)),
        "logprobs": draw(st.integers(0, 5)),
        "max_tokens": draw(st.integers(1, 24)),
        "echo": draw(st.booleans()),
        "seed": draw(st.integers(0, 9)),
        "stop": draw(st.sampled_from([[], ["ab"], ["st", "b🙂"], ["éa"]])),
        "skip_special_tokens": draw(st.booleans()),
    }


@settings(max_examples=25)
@given(bodies(), st.sampled_from([None, 6]), st.integers(1, 4))
def test_every_token_of_a_completion_has_its_entry_whole_and_streamed(body, eos_every, at_once):
    model = FakeModel(ids=IDS, eos_every=eos_every)
    answer = whole("completion", {**body, "return_token_ids": True}, model)
    [choice] = answer["choices"]
    text, arrays = choice["text"], choice["logprobs"]
    prompt = ids_of(body["prompt"])
    ids = [*prompt, *choice["token_ids"]]
    first = 0 if body["echo"] else len(prompt)
    # Figures are the model's.
    assert len(arrays["tokens"]) == len(ids) - first
    for n, at in enumerate(range(first, len(ids))):
        told, top = arrays["token_logprobs"][n], arrays["top_logprobs"][n]
        if at == 0:
            assert told is None
            assert top is None
            continue
        score = model.score(ids[:at], ids[at], body["logprobs"])
        assert told == score.logprob
        assert top[arrays["tokens"][n]] == told
        assert sorted(top.values(), reverse=True)[: body["logprobs"]] == list(score.top_logprobs)
        assert len(top) == body["logprobs"] + (ids[at] not in score.top_ids)
    # Offsets are those of the text: each token stands where it begins.
    offsets = arrays["text_offset"]
    assert offsets == sorted(offsets)
    for token, offset, token_id in zip(arrays["tokens"], offsets, ids[first:]):
        assert 0 <= offset <= len(text)
        shown = not (body["skip_special_tokens"] and TOKENIZER.is_special(token_id))
        if shown and not token.startswith(("bytes:", "<")):
            assert text[offset : offset + len(token)] == token[: len(text) - offset]
    # Streamed it is the same, and an entry is where the first character of its token is.
    pieces = chunks("completion", body, model, at_once)
    joined = [piece["logprobs"] for piece in pieces if piece["logprobs"] is not None]
    for name, values in arrays.items():
        assert [value for part in joined for value in part[name]] == values
    assert "".join(piece["text"] for piece in pieces) == text
    end = 0
    for piece in pieces:
        begin, end = end, end + len(piece["text"])
        here = [] if piece["logprobs"] is None else piece["logprobs"]["text_offset"]
        if piece["finish_reason"] is None and not (begin == 0 and body["echo"]):
            assert all(begin <= offset < end for offset in here)


@settings(max_examples=10)
@given(st.integers(0, 5), st.integers(0, 9), st.sampled_from([[], ["ab"], ["éa"]]))
def test_every_token_of_a_chat_answer_has_its_entry_whole_and_streamed(top, seed, stop):
    model = FakeModel(ids=IDS, eos_every=8)
    body: dict[str, Any] = {"messages": MESSAGES, "max_tokens": 20, "seed": seed, "stop": stop}
    body |= {"logprobs": True, "top_logprobs": top}
    answer = whole("chat", {**body, "return_token_ids": True}, model)
    [choice] = answer["choices"]
    assert choice["logprobs"]["refusal"] is None
    context, content = list(answer["prompt_token_ids"]), choice["logprobs"]["content"]
    assert len(content) == len(choice["token_ids"])
    for token_id, entry in zip(choice["token_ids"], content):
        score = model.score(context, token_id, top)
        assert bytes(entry["bytes"]) == TOKENIZER.token_bytes(token_id)
        assert entry["logprob"] == score.logprob
        assert [one["logprob"] for one in entry["top_logprobs"]] == list(score.top_logprobs)
        assert [bytes(one["bytes"]) for one in entry["top_logprobs"]] == [
            TOKENIZER.token_bytes(i) for i in score.top_ids
        ]
        context.append(token_id)
    pieces = chunks("chat", body, model)
    joined = [piece["logprobs"]["content"] for piece in pieces if piece["logprobs"] is not None]
    assert [entry for part in joined for entry in part] == content


def test_text_offsets_with_echo_go_on_from_the_prompt():
    body = {"prompt": "é the b", "echo": True, "logprobs": 0, "max_tokens": 3, "seed": 0}
    [choice] = whole("completion", body, FakeModel(ids=(3 + ord("x"),)))["choices"]
    assert choice["text"] == "é the bxxx"
    assert choice["logprobs"]["tokens"] == ["é", " the", " ", "b", "x", "x", "x"]
    assert choice["logprobs"]["text_offset"] == [0, 1, 5, 6, 7, 8, 9]


def test_scoring_by_echo_gets_the_prompts_log_probabilities_and_one_more():
    """As lm-evaluation-harness asks and reads, a generated EOS included."""
    model = FakeModel(eos_every=1)
    prompts = [TOKENIZER.encode("the ab"), [BOS, *TOKENIZER.encode("ba stop")]]
    body = {"prompt": prompts, "echo": True, "max_tokens": 1, "logprobs": 1, "temperature": 0, "seed": 1234}
    answer = whole("completion", body, model)
    for ids, choice in zip(prompts, answer["choices"]):
        arrays, num_context = choice["logprobs"], 2
        assert len(arrays["tokens"]) == len(ids) + 1
        assert arrays["tokens"][-1] == "<eos>"
        told, tops = (arrays[name][num_context:-1] for name in ("token_logprobs", "top_logprobs"))
        scores = [model.score(ids[:at], ids[at], 1) for at in range(num_context, len(ids))]
        assert told == [one.logprob for one in scores]
        is_greedy = [one == max(top.values()) for one, top in zip(told, tops)]
        assert is_greedy == [one.rank == 1 for one in scores]


def test_a_log_probability_of_minus_infinity_or_nan_is_valid_json():
    figures = [None, *(TokenLogprobs(3, x, 1, (4,), (x,)) for x in (-math.inf, math.nan))]
    entries = prompt_entries(TOKENIZER, [3, 3, 3], figures, TOKENIZER.decode([3, 3, 3]))
    arrays = completion_logprobs(entries, 1, TOKENIZER)
    assert arrays["token_logprobs"] == [None, -9999.0, -9999.0]
    assert arrays["top_logprobs"][1:] == [{"\x01": -9999.0, "\0": -9999.0}] * 2
    json.loads(json.dumps(arrays), parse_constant=pytest.fail)


def test_with_max_tokens_0_there_is_the_prompt_alone_up_to_the_whole_context():
    ids = [3 + ord("a")] * CONFIG.max_model_len
    body = {"prompt": ids, "echo": True, "max_tokens": 0, "logprobs": 2}
    answer = whole("completion", body, FakeModel())
    [choice] = answer["choices"]
    assert choice["text"] == "a" * len(ids)
    assert choice["finish_reason"] == "length"
    assert {len(values) for values in choice["logprobs"].values()} == {len(ids)}
    assert answer["usage"]["completion_tokens"] == 0


@pytest.mark.parametrize("path", ["completion", "chat"])
def test_prompt_logprobs_are_by_token_id_the_first_being_null(path):
    body: dict[str, Any] = {"prompt": "ab the"} if path == "completion" else {"messages": MESSAGES}
    model = FakeModel()
    body |= {"prompt_logprobs": 2, "max_tokens": 2, "n": 3, "return_token_ids": True}
    answer = whole(path, body, model)
    holders = answer["choices"] if path == "completion" else [answer]
    for holder in holders:
        ids, (first, *rest) = holder["prompt_token_ids"], holder["prompt_logprobs"]
        assert first is None
        assert len(rest) == len(ids) - 1
        for at, told in enumerate(rest, 1):
            score = model.score(ids[:at], ids[at], 2)
            wanted = {i: (x, r) for r, (i, x) in enumerate(zip(score.top_ids, score.top_logprobs), 1)}
            wanted[ids[at]] = score.logprob, score.rank
            assert {int(i): (one["logprob"], one["rank"]) for i, one in told.items()} == wanted
            assert told[str(ids[at])]["decoded_token"] == TOKENIZER.token_bytes(ids[at]).decode()
    if path == "completion":
        assert [choice["logprobs"] for choice in answer["choices"]] == [None] * 3


def test_each_choice_has_its_own_entries_and_best_of_shows_none_that_nobody_asked_for():
    model = FakeModel()
    body = {"prompt": ["ab", "the b"], "n": 2, "max_tokens": 4, "seed": 5, "return_token_ids": True}
    for more in ({"logprobs": 1, "echo": True}, {"logprobs": 1, "best_of": 3}):
        for choice in whole("completion", {**body, **more}, model)["choices"]:
            ids = choice["prompt_token_ids"] + choice["token_ids"]
            told = choice["logprobs"]["token_logprobs"][-4:]
            assert told == [model.score(ids[:at], ids[at], 0).logprob for at in range(len(ids) - 4, len(ids))]
    for choice in whole("completion", {**body, "best_of": 3}, model)["choices"]:
        assert choice["logprobs"] is None


def test_tokens_of_the_same_text_are_told_apart():
    """Byte 0x41 as a piece of its own, and again inside the vocabulary."""

    class Doubled(FakeTokenizer):
        def token_bytes(self, token_id: int) -> bytes:
            return b"A" if token_id in (10, 11, 12) else super().token_bytes(token_id)

    figures = TokenLogprobs(11, -2.0, 2, (10, 11, 12), (-1.0, -2.0, -3.0))
    entries = prompt_entries(Doubled(), [11], [figures], "A")
    [top] = completion_logprobs(entries, 3, Doubled())["top_logprobs"]
    assert top == {"token_id:10": -1.0, "A": -2.0, "token_id:12": -3.0}


def test_a_bos_or_space_that_the_tokenizer_put_in_front_has_no_width():
    ids = [BOS, *TOKENIZER.encode(" the b")]
    for text, offsets in ((" the b", [0, 0, 4, 5]), ("the b", [0, 0, 3, 4]), ("other", [0, 5, 5, 5])):
        entries = prompt_entries(TOKENIZER, ids, [None] * len(ids), text)
        assert [entry.offset for entry in entries] == offsets


REFUSED = [
    (parse_completion, {"logprobs": 21}, "logprobs", r"at most 20, got 21.*--max-logprobs"),
    (parse_completion, {"logprobs": -1}, "logprobs", "at least 0, got -1"),
    (parse_completion, {"prompt_logprobs": 21}, "prompt_logprobs", "at most 20, got 21"),
    (parse_completion, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "'stream' to false"),
    (parse_chat, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "at most 20, got 21"),
    (parse_chat, {"top_logprobs": 3}, "top_logprobs", "set 'logprobs' to true"),
    (parse_chat, {"logprobs": 1}, "logprobs", "true or false, got 1"),
]


@pytest.mark.parametrize(("parse", "fields", "param", "message"), REFUSED)
def test_what_can_not_be_told_is_refused_with_field_limit_and_remedy(parse, fields, param, message):
    body = {"prompt": "x"} if parse is parse_completion else {"messages": MESSAGES}
    with pytest.raises(RequestError, match=message) as caught:
        parse({**body, **fields}, SERVED, 0.0)
    assert caught.value.param == param


# The official client.


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def test_the_client_reads_a_completions_log_probabilities(client):
    fields: dict[str, Any] = {
        "model": MODEL, "prompt": "ab", "max_tokens": 3, "seed": 1, "logprobs": 2, "echo": True,
    }  # fmt: skip
    answer = client.completions.create(**fields)
    arrays = answer.choices[0].logprobs
    assert "".join(arrays.tokens) == answer.choices[0].text
    first, *rest = zip(arrays.tokens, arrays.token_logprobs, arrays.top_logprobs)
    assert first == ("ab", None, None)
    assert all(top[token] == logprob for token, logprob, top in rest)
    parts = [chunk.choices[0].logprobs for chunk in client.completions.create(**fields, stream=True)]
    assert [token for part in parts if part for token in part.tokens] == arrays.tokens


def test_the_clients_streaming_helper_gathers_a_chats_log_probabilities(client):
    fields: dict[str, Any] = {
        "model": MODEL, "messages": MESSAGES, "max_tokens": 150, "seed": 3, "stop": list("aeio"),
        "logprobs": True, "top_logprobs": 2,
    }  # fmt: skip
    whole = client.chat.completions.create(**fields)
    content = whole.choices[0].logprobs.content
    assert "".join(entry.token for entry in content)[:-1] == whole.choices[0].message.content
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    with client.chat.completions.stream(**fields) as stream:
        parts = [event.content for event in stream if event.type == "logprobs.content.delta"]
        final = stream.get_final_completion()
    assert final.choices[0].logprobs.content == content
    assert [entry for part in parts for entry in part] == content
