"""Where servers of this kind are commonly wrong: one black-box test for each fault."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

from jaxserve.server.lifecycle import ServerOptions
from jaxserve.server.schema import ChatBody, CompletionBody
from jaxserve.tokenizer.chat import ChatTemplate
from jaxserve.tokenizer.load import from_gguf
from jaxserve.types import TokenLogprobs
from tests.fakes import BOS, FakeModel, FakeTokenizer
from tests.server.running import CONFIG, RunningServer, raw_post, text_prompt
from tests.server.scripted import scripted
from tests.tokenizer.test_sentencepiece import gguf_of, train

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]
BOTH: list[tuple[str, dict[str, Any]]] = [(COMPLETIONS, {"prompt": "hello"}), (CHAT, {"messages": MESSAGES})]
N = CONFIG.max_model_len
VOCAB = FakeTokenizer().vocab_size

both = pytest.mark.parametrize(("path", "prompt"), BOTH)


def streamed_text(server: RunningServer, path: str, body: dict[str, Any]) -> tuple[str, list[str]]:
    """The joined text of a stream of one choice, and its pieces."""
    pieces = []
    for event in server.stream(path, body)[:-1]:
        for choice in event["choices"]:
            text = choice["text"] if "text" in choice else choice["delta"].get("content")
            pieces += [text] if text else []
    return "".join(pieces), pieces


def whole_text(server: RunningServer, path: str, body: dict[str, Any]) -> str:
    _, answer = server.post(path, body)
    [choice] = answer["choices"]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def assert_still_serves(server: RunningServer) -> None:
    assert server.request("GET", "/health")[0] == 200
    assert server.post(COMPLETIONS, {"prompt": "x", "max_tokens": 2})[1]["usage"]["completion_tokens"] == 2


def test_01_a_character_split_over_two_tokens_arrives_whole():
    # Every token is one byte of a longer character, or a letter.
    ids = tuple(3 + byte for byte in "éa".encode())
    with RunningServer(fake_model=FakeModel(ids=ids)) as server:
        for path, prompt in BOTH:
            for seed in range(4):
                body = {**prompt, "max_tokens": 100, "seed": seed, "return_token_ids": True}
                _, answer = server.post(path, body)
                [choice] = answer["choices"]
                joined, pieces = streamed_text(server, path, body)
                assert joined == FakeTokenizer().decode(choice["token_ids"])
                assert joined == (choice["text"] if "text" in choice else choice["message"]["content"])
                # What no later byte can complete is U+FFFD; what one can is held back until it is there.
                assert any("é" in piece for piece in pieces)


@both
def test_02_no_part_of_a_stop_string_is_streamed(server, path, prompt):
    body = {**prompt, "max_tokens": 80, "seed": 1}
    text = whole_text(server, path, body)
    for at in (20, 61):
        stop = text[at : at + 12]
        expected = text[: text.index(stop)]
        joined, _ = streamed_text(server, path, {**body, "stop": stop})
        assert joined == expected
        # A stop string that never gets complete is text, to its last letter.
        almost = [stop[:-1] + "\0"]
        assert streamed_text(server, path, {**body, "stop": almost})[0] == text


def test_03_the_leading_space_of_a_sentencepiece_token_survives_every_chunk_border():
    tokenizer = from_gguf(gguf_of(train()))
    spaced = tuple(i for i in range(tokenizer.vocab_size) if tokenizer.token_bytes(i).startswith(b" "))
    assert len(spaced) > 3
    with RunningServer(fake_model=FakeModel(ids=spaced), tokenizer=tokenizer) as server:
        body = {"prompt": "the cat", "max_tokens": 40, "seed": 1, "return_token_ids": True}
        _, answer = server.post(COMPLETIONS, body)
        [choice] = answer["choices"]
        expected = b"".join(map(tokenizer.token_bytes, choice["token_ids"])).decode()
        assert choice["text"] == expected
        assert expected.startswith(" ")
        assert streamed_text(server, COMPLETIONS, body)[0] == expected


@pytest.mark.parametrize("stream", [False, True])
def test_04_a_tool_call_that_is_cut_off_says_length(stream):
    call = '<tool_call>\n{"name": "now", "arguments": {"zone": "UTC"}}\n</tool_call>'
    template = ChatTemplate("<turn>assistant\n{# <tool_call> #}{{ tools | length }}<turn>assistant\n",
                            bos_token="<bos>", eos_token="<eos>")  # fmt: skip
    tools = [{"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}]
    body = {"messages": MESSAGES, "tools": tools, "temperature": 0}
    with RunningServer(fake_model=scripted(call), chat_template=template) as server:
        for max_tokens, reason in ((20, "length"), (len(call) - 16, "length"), (200, "tool_calls")):
            if stream:
                events = server.stream(CHAT, {**body, "max_tokens": max_tokens})
                *_, told = [event["choices"][0]["finish_reason"] for event in events[:-1]]
            else:
                _, answer = server.post(CHAT, {**body, "max_tokens": max_tokens})
                told = answer["choices"][0]["finish_reason"]
            assert told == reason


def test_05_usage_counts_the_tokens_of_all_choices_and_each_prompt_once(server):
    for path, prompt in BOTH:
        _, one = server.post(path, {**prompt, "max_tokens": 7})
        body = {**prompt, "max_tokens": 7, "n": 3}
        _, three = server.post(path, body)
        *_, last, _ = server.stream(path, {**body, "stream_options": {"include_usage": True}})
        for usage in (three["usage"], last["usage"]):
            assert usage["completion_tokens"] == 21
            assert usage["prompt_tokens"] == one["usage"]["prompt_tokens"]
            assert usage["total_tokens"] == usage["prompt_tokens"] + 21


@pytest.mark.parametrize("prompt", ["the café says é", FakeTokenizer().encode("the 🙂 stop")])
def test_06_text_offset_is_where_each_tokens_text_begins_echo_included(server, prompt):
    tokenizer = FakeTokenizer()
    body = {"prompt": prompt, "echo": True, "logprobs": 1, "max_tokens": 12, "seed": 1}
    _, answer = server.post(COMPLETIONS, {**body, "return_token_ids": True})
    [choice] = answer["choices"]
    ids = choice["prompt_token_ids"] + choice["token_ids"]
    offsets = choice["logprobs"]["text_offset"]
    assert len(offsets) == len(ids) == len(choice["logprobs"]["tokens"])
    # A token's text is shown once its last byte is there, so it begins where all before it end.
    so_far = [b"".join(map(tokenizer.token_bytes, ids[:n])) for n in range(len(ids))]
    assert offsets == [len(raw.decode(errors="ignore")) for raw in so_far]
    streamed = [event["choices"][0] for event in server.stream(COMPLETIONS, body)[:-1]]
    parts = [part["logprobs"]["text_offset"] for part in streamed if part["logprobs"]]
    assert [offset for part in parts for offset in part] == offsets


def test_07_an_echo_has_the_logprobs_of_the_prompt_then_one_generated_entry(server):
    prompts = [FakeTokenizer().encode(text) for text in ("the score", "abab stop")]
    body = {"prompt": prompts, "echo": True, "max_tokens": 1, "logprobs": 1, "temperature": 0}
    _, answer = server.post(COMPLETIONS, body)
    for choice, prompt in zip(answer["choices"], prompts):
        arrays = choice["logprobs"]
        assert {len(values) for values in arrays.values()} == {len(prompt) + 1}
        assert arrays["token_logprobs"][0] is arrays["top_logprobs"][0] is None
        for n in range(1, len(prompt)):
            expected = FakeModel().score(prompt[:n], prompt[n], 1).logprob
            assert arrays["token_logprobs"][n] == expected
            assert arrays["top_logprobs"][n][arrays["tokens"][n]] == expected
        last = arrays["tokens"][-1]
        assert arrays["top_logprobs"][-1][last] == arrays["token_logprobs"][-1]


def test_08_max_tokens_0_is_the_echo_of_the_prompt_or_a_400(server):
    status, answer = server.post(COMPLETIONS, {"prompt": "hello", "max_tokens": 0, "echo": True})
    assert (status, answer["choices"][0]["text"]) == (200, "hello")
    assert answer["usage"]["completion_tokens"] == 0
    for path, fields in (
        (COMPLETIONS, {"prompt": "hello", "max_tokens": 0}),
        (CHAT, {"messages": MESSAGES, "max_tokens": 0}),
        (CHAT, {"messages": MESSAGES, "max_completion_tokens": 0}),
    ):
        status, answer = server.post(path, fields)
        assert (status, answer["error"]["param"]) == (400, list(fields)[-1])
    assert_still_serves(server)


@pytest.mark.parametrize("source", ["{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"])
def test_09_bos_stands_once_before_a_chat_whoever_puts_it_there(source):
    tokenizer = FakeTokenizer()
    tokenizer.add_bos = True
    template = ChatTemplate(source, bos_token="<bos>", eos_token="<eos>")
    with RunningServer(tokenizer=tokenizer, chat_template=template) as server:
        for path, prompt in BOTH:
            _, answer = server.post(path, {**prompt, "max_tokens": 1, "return_token_ids": True})
            ids = answer.get("prompt_token_ids") or answer["choices"][0]["prompt_token_ids"]
            assert ids == [BOS, *tokenizer.encode("hello")]


@pytest.mark.parametrize("stream", [True, False])
@both
def test_10_a_closed_connection_ends_the_request(server, path, prompt, stream):
    before = server.metric("jaxserve:generation_tokens_total")
    server.runner.step_s = 0.02
    with server.connect() as connection:
        connection.sendall(raw_post(path, {**prompt, "max_tokens": 200, "stream": stream}))
        server.wait(lambda: server.metric("jaxserve:generation_tokens_total") > before + 1)
    server.wait_idle(10)
    assert server.metric("jaxserve:generation_tokens_total") < before + 200


@both
def test_11_a_seeded_answer_is_the_same_whoever_shares_the_batch(server, path, prompt):
    # Here up to the device; that the device's draws keep to it is tested in tests/runtime/test_answers.py.
    body = {**prompt, "max_tokens": 40, "seed": 9}
    alone = whole_text(server, path, body)
    assert whole_text(server, path, {**body, "seed": 10}) != alone
    server.runner.hold()
    with server.connect() as others:
        others.sendall(raw_post(COMPLETIONS, {"prompt": ["a", "hello"], "max_tokens": 200, "stream": True}))
        server.wait(lambda: server.server.num_open == 2)
        server.runner.step_s = 0.005
        server.runner.release()
        assert whole_text(server, path, body) == alone
    if path == COMPLETIONS:
        _, together = server.post(path, {**body, "prompt": ["b", "hello", "c", "d"]})
        assert together["choices"][1]["text"] == alone


@pytest.mark.parametrize(
    ("path", "prompt"), [(COMPLETIONS, {"prompt": ["one", "two"]}), (CHAT, {"messages": MESSAGES})]
)
def test_12_every_streamed_chunk_has_the_index_of_its_choice(server, path, prompt):
    body = {**prompt, "max_tokens": 10, "seed": 4, "n": 3}
    _, whole = server.post(path, body)
    texts = [c["text"] if "text" in c else c["message"]["content"] for c in whole["choices"]]
    assert len(set(texts)) == len(texts)
    joined = [""] * len(texts)
    for event in server.stream(path, body)[:-1]:
        [choice] = event["choices"]
        joined[choice["index"]] += (
            choice["text"] if "text" in choice else choice["delta"].get("content") or ""
        )
    assert joined == texts


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", ""], [[5], []], None])
def test_13_an_empty_prompt_is_a_400_and_the_server_lives(server, prompt):
    status, answer = server.post(COMPLETIONS, {"prompt": prompt})
    assert (status, answer["error"]["param"]) == (400, "prompt")
    assert server.post(CHAT, {"messages": []})[1]["error"]["param"] == "messages"
    assert_still_serves(server)


def test_14_an_overflow_by_one_token_is_told_with_the_right_numbers(server):
    fits = {"prompt": text_prompt(N - 10), "max_tokens": 10}
    assert server.post(COMPLETIONS, fits)[1]["usage"]["total_tokens"] == N
    for body, requested in (
        ({**fits, "max_tokens": 11}, N + 1),
        ({**fits, "prompt": text_prompt(N - 9)}, N + 1),
        ({"prompt": text_prompt(N - 1), "max_tokens": 1}, None),
        ({"prompt": text_prompt(N), "max_tokens": 1}, N + 1),
    ):
        status, answer = server.post(COMPLETIONS, body)
        if requested is None:
            assert (status, answer["usage"]["total_tokens"]) == (200, N)
            continue
        message = answer["error"]["message"]
        assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
        assert f"maximum context length is {N} tokens" in message
        assert f"requested {requested} tokens" in message or f"has {N} tokens" in message


def test_15_a_large_body_gets_a_context_error_and_one_over_the_limit_gets_json():
    options = ServerOptions(port=0, max_body_bytes=3_000_000, shutdown_timeout_s=5)
    with RunningServer(options=options) as server:
        for path, body in (
            (COMPLETIONS, {"prompt": "a" * 2_000_000}),
            (CHAT, {"messages": [{"role": "user", "content": "a" * 2_000_000}]}),
        ):
            status, answer = server.post(path, body)
            assert (status, answer["error"]["code"]) == (400, "context_length_exceeded")
            assert f"maximum context length is {N} tokens" in answer["error"]["message"]
        status, answer = server.post(COMPLETIONS, {"prompt": "a" * 3_000_000})
        assert (status, answer["error"]["code"]) == (413, "request_too_large")
        assert "3000000 bytes" in answer["error"]["message"]
        assert_still_serves(server)


@pytest.mark.parametrize("raw", [b"{x", b"[]", b'"s"', b"null", b"", b"5", b"true", b"\xff", b'{"a": 1} x'])
@both
def test_16_a_body_that_is_no_object_is_a_400(server, path, prompt, raw):
    status, _, answer = server.request("POST", path, raw)
    assert status == 400
    assert json.loads(answer)["error"]["type"] == "invalid_request_error"
    assert_still_serves(server)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "-1", "1e999", '"hot"', "[]", "true"])
@both
def test_17_a_temperature_that_is_no_temperature_is_a_400_and_the_engine_lives(server, path, prompt, value):
    raw = json.dumps({**prompt, "max_tokens": 2, "temperature": "?"}).replace('"?"', value).encode()
    status, _, answer = server.request("POST", path, raw)
    error = json.loads(answer)["error"]
    assert status == 400
    assert error["param"] == "temperature" or error["code"] == "invalid_json"
    assert_still_serves(server)


@pytest.mark.parametrize("wrong", [VOCAB, 10**6, -1])
@both
def test_18_an_id_outside_of_the_vocabulary_is_a_400_that_names_it(server, path, prompt, wrong):
    for name, value in (
        ("logit_bias", {str(wrong): 5}),
        ("stop_token_ids", [5, wrong]),
        ("allowed_token_ids", [5, wrong]),
    ):
        status, answer = server.post(path, {**prompt, "max_tokens": 2, name: value})
        error = answer["error"]
        assert (status, error["param"].partition("[")[0]) == (400, name)
        assert str(wrong) in error["message"]
    if path == COMPLETIONS:
        assert server.post(path, {"prompt": [5, wrong]})[1]["error"]["param"] == "prompt"
    assert_still_serves(server)


class Certain(FakeModel):
    """Some tokens are impossible in its eyes, and a figure may be no number at all."""

    def score(self, context: Sequence[int], token_id: int, count: int) -> TokenLogprobs:
        figure = (float("-inf"), float("nan"), -1.0)[len(context) % 3]
        return TokenLogprobs(token_id, figure, 1, (token_id, 5)[:count], (figure, float("-inf"))[:count])


def test_19_an_infinite_logprob_is_valid_json():
    def no_constant(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    with RunningServer(fake_model=Certain()) as server:
        for path, fields in (
            (COMPLETIONS, {"prompt": "hello", "logprobs": 2, "echo": True}),
            (CHAT, {"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}),
            (COMPLETIONS, {"prompt": "hello", "prompt_logprobs": 2}),
        ):
            body = {**fields, "max_tokens": 6}
            status, _, raw = server.request("POST", path, body)
            answer = json.loads(raw, parse_constant=no_constant)
            assert status == 200
            assert "-9999" in json.dumps(answer)
            if "prompt_logprobs" not in fields:
                _, _, raw = server.request("POST", path, {**body, "stream": True})
                for line in raw.decode().split("\n\n")[:-2]:
                    json.loads(line.removeprefix("data: "), parse_constant=no_constant)


@both
def test_20_a_stream_has_no_usage_chunk_unless_asked(server, path, prompt):
    for options in ({}, {"stream_options": None}, {"stream_options": {"include_usage": False}}):
        events = server.stream(path, {**prompt, "max_tokens": 4, **options})
        assert all("usage" not in event and event["choices"] for event in events[:-1])
    *events, last, _ = server.stream(
        path, {**prompt, "max_tokens": 4, "stream_options": {"include_usage": True}}
    )
    assert all(event["usage"] is None for event in events)
    assert (last["choices"], last["usage"]["completion_tokens"]) == ([], 4)


@both
def test_21_null_for_an_optional_field_is_its_default(server, path, prompt):
    model = CompletionBody if path == COMPLETIONS else ChatBody
    optional = [field.alias or name for name, field in model.model_fields.items() if not field.is_required()]
    assert len(optional) > 30
    body = {**prompt, "max_tokens": 5, "seed": 1}
    status, answer = server.post(path, {**dict.fromkeys(optional), **body})
    assert status == 200
    assert answer["choices"] == server.post(path, body)[1]["choices"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}},
         "response_format"),
        ({"structured_outputs": {"json": {"$ref": "#/nowhere"}}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "(unclosed"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "start: nowhere"}}, "structured_outputs"),
    ],
)  # fmt: skip
@both
def test_22_an_invalid_schema_or_regex_is_a_400_and_the_engine_lives(server, path, prompt, fields, param):
    status, answer = server.post(path, {**prompt, **fields, "max_tokens": 5})
    assert status == 400
    assert answer["error"]["param"].startswith(param)
    assert len(answer["error"]["message"]) > 30
    assert_still_serves(server)


@pytest.mark.parametrize("value", ["", [""], ["a", ""]])
@both
def test_23_an_empty_stop_string_is_a_400(server, path, prompt, value):
    status, answer = server.post(path, {**prompt, "stop": value})
    assert (status, answer["error"]["param"]) == (400, "stop")
    assert "empty string" in answer["error"]["message"]
    assert server.post(path, {**prompt, "stop": [], "max_tokens": 3})[1]["usage"]["completion_tokens"] == 3
