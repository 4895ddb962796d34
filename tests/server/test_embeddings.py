"""/v1/embeddings: the official client, the fields, the limits."""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import openai
import pytest

from jaxserve.errors import RequestError
from jaxserve.server.embeddings import EmbeddingsRenderer, parse_embeddings
from jaxserve.server.schema.embeddings import REFUSED_EMBEDDINGS
from jaxserve.types import Event, Pooling, Request
from tests.fakes import BOS, HIDDEN, FakeTokenizer
from tests.server.running import CONFIG, MODEL, RunningServer, raw_post, served_model, text_prompt

PATH = "/v1/embeddings"
SERVED = served_model()
N = CONFIG.max_model_len
PLAIN = FakeTokenizer()
ASKS_FOR_SOMETHING: dict[str, Any] = {
    "dimensions": 2, "normalize": False, "embed_dtype": "float16", "endianness": "big"
}  # fmt: skip


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def expected(
    server: RunningServer, texts: Sequence[str | list[int]], pooling: Pooling = "last"
) -> list[list[float]]:
    """The vectors, as the engine would give them one by one."""
    ids = [PLAIN.encode(text) if isinstance(text, str) else text for text in texts]
    return [server.runner.model.embedding(one, pooling).tolist() for one in ids]


def vectors(answer: dict[str, Any]) -> list[list[float]]:
    assert [item["index"] for item in answer["data"]] == list(range(len(answer["data"])))
    return [item["embedding"] for item in answer["data"]]


def parse(**fields: Any) -> tuple[Request, ...]:
    return parse_embeddings({"input": "hello", **fields}, SERVED, 0.0).requests


TEXTS = ["ab the", "é🙂", "x", "hello", "ab the stop", "hello"]  # more than there are slots


@pytest.mark.parametrize("encoding_format", [openai.NOT_GIVEN, "float"])  # by itself it asks for base64
def test_the_official_client_gets_the_vector_of_each_text_in_order(server, client, encoding_format):
    answer = client.embeddings.create(model=MODEL, input=TEXTS, encoding_format=encoding_format, user="u")
    assert [item.index for item in answer.data] == list(range(len(TEXTS)))
    np.testing.assert_allclose([item.embedding for item in answer.data], expected(server, TEXTS), rtol=1e-6)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(len(PLAIN.encode(t)) for t in TEXTS)
    assert answer.model == MODEL


def test_base64_is_little_endian_float32():
    asked = parse_embeddings({"input": "x", "encoding_format": "base64"}, SERVED, 0.0)
    answer = EmbeddingsRenderer(asked)
    answer.collect(0, Event("a", 0.0, finish_reason="length", embedding=np.array([1, -2.5], ">f4")))
    assert base64.b64encode(b"\0\0\x80\x3f\0\0\x20\xc0").decode() in answer.response()


@pytest.mark.parametrize("path", [PATH, "/embeddings"])
@pytest.mark.parametrize(
    ("sent", "texts"),
    [
        ("ab the", ["ab the"]),
        (["ab the", "x"], ["ab the", "x"]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6, 7], [8]], [[5, 6, 7], [8]]),
        (text_prompt(N), [text_prompt(N)]),
    ],
)
def test_input_is_a_text_texts_ids_or_lists_of_ids_up_to_the_whole_context(server, path, sent, texts):
    status, answer = server.post(path, {"input": sent})
    assert status == 200
    np.testing.assert_allclose(vectors(answer), expected(server, texts), rtol=1e-6)


def test_a_text_has_the_same_vector_alone_and_in_a_batch_and_unit_length(server):
    _, batch = server.post(PATH, {"input": TEXTS})
    for text, vector in zip(TEXTS, vectors(batch)):
        _, alone = server.post(PATH, {"input": text})
        assert vectors(alone) == [vector]
        assert len(vector) == HIDDEN
        assert abs(np.linalg.norm(vector) - 1) < 1e-6


def test_special_tokens_and_truncation_are_as_in_a_completion(server):
    tokenizer = FakeTokenizer()
    tokenizer.add_bos = True
    served = served_model(tokenizer=tokenizer)

    def ids(**fields: Any) -> tuple[int, ...]:
        [request] = parse_embeddings({"input": "hello", **fields}, served, 0.0).requests
        return request.prompt_ids

    plain = PLAIN.encode("hello")
    assert ids() == (BOS, *plain)
    assert ids(add_special_tokens=False) == tuple(plain)
    assert ids(truncate_prompt_tokens=3) == (BOS, *plain[-2:])
    assert ids(input=text_prompt(N + 9), truncate_prompt_tokens=-1) == (
        BOS, *PLAIN.encode(text_prompt(N + 9))[1 - N :]
    )  # fmt: skip


def test_fields_of_embeddings_for_the_engine_itself_reach_it():
    first, second = parse(input=["a", "b"], priority=-3, timeout=2.5, cache_salt="tenant", user="u")
    for request in (first, second):
        assert (request.priority, request.timeout_s, request.cache_salt) == (-3, 2.5, "tenant")
        assert (request.embeds, request.params.max_tokens) == (True, 0)
    assert first.request_id != second.request_id


@pytest.mark.parametrize("name", REFUSED_EMBEDDINGS)
def test_what_embeddings_do_not_honour_is_refused_by_name_unless_it_asks_for_nothing(name):
    for value in (None, *REFUSED_EMBEDDINGS[name]):
        parse(**{name: value})
    with pytest.raises(RequestError, match="not supported") as caught:
        parse(**{name: ASKS_FOR_SOMETHING[name]})
    assert caught.value.param == name


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"input": None}, "input", "'input' is required"),
    ({"input": ""}, "input", "'input' must not be empty"),
    ({"input": ["a", ""]}, "input", "'input' must not be empty"),
    ({"input": []}, "input", "'input' must not be empty"),
    ({"input": [[]]}, "input", "'input' must not be empty"),
    ({"input": 5}, "input", "a string, a list of strings"),
    ({"input": ["a", 5]}, "input", "a string, a list of strings"),
    ({"input": [3, PLAIN.vocab_size]}, "input", f"'input' has the token id {PLAIN.vocab_size}, outside of"),
    ({"input": ["a"] * 1025}, "input", "1025 texts, at most 1024 fit in one request"),
    ({"input": text_prompt(N + 1)}, "input", f"length is {N} tokens. However, 'input' has {N + 1} tokens."),
    ({"input": ["a", text_prompt(N + 1)]}, "input", f"'input[1]' has {N + 1} tokens. Shorten it, or set "),
    ({"input": "a" * 9000}, "input", "'input' has a text of 9000 characters"),
    ({"encoding_format": "hex"}, "encoding_format", "'float' or 'base64', got \"hex\""),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "at least -1, got -2"),
    ({"truncate_prompt_tokens": N + 1}, "truncate_prompt_tokens", f"{N} tokens, got {N + 1}"),
]


@pytest.mark.parametrize(("sent", "param", "text"), WRONG)
def test_a_wrong_field_of_embeddings_is_an_error_that_names_field_value_and_limit(sent, param, text):
    with pytest.raises(RequestError) as caught:
        parse(**sent)
    assert (caught.value.param, caught.value.status) == (param, 400)
    assert text in caught.value.message


def test_other_models_and_priorities_that_have_no_effect_are_refused(server):
    status, answer = server.post(PATH, {"input": "x", "model": "other"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    status, answer = server.post(PATH, {"input": "x", "priority": 1})
    assert (status, answer["error"]["param"]) == (400, "priority")


def test_texts_count_in_the_queue_one_by_one_and_a_batch_that_does_not_fit_leaves_nothing_behind():
    config = replace(CONFIG, max_num_queued=2)
    with RunningServer(config=config) as running:
        running.runner.hold()
        status, answer = running.post(PATH, {"input": ["a"] * 40})  # far more than it can hold
        assert (status, answer["error"]["code"]) == (429, "queue_full")
        running.runner.release()
        running.wait_idle()
        assert running.post(PATH, {"input": ["a"] * (config.max_num_seqs + 2)})[0] == 200


def test_leaving_ends_the_embedding_of_all_texts(server):
    server.runner.hold()
    connection = server.connect()
    connection.sendall(raw_post(PATH, {"input": TEXTS}))
    server.wait(lambda: server.server.num_open == len(TEXTS))
    connection.close()
    server.wait(lambda: server.server.num_open == 0)
    server.runner.release()
    server.wait_idle()


def test_the_server_pools_as_it_is_told_and_metrics_count_texts_and_tokens():
    with RunningServer(config=replace(CONFIG, pooling="mean")) as running:
        status, answer = running.post(PATH, {"input": TEXTS})
        assert status == 200
        np.testing.assert_allclose(vectors(answer), expected(running, TEXTS, "mean"), rtol=1e-6)
        assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
        running.post(PATH, {"input": ""})
        num_tokens = answer["usage"]["prompt_tokens"]
        for name, value in {
            "embeddings_total": len(TEXTS),
            "request_success_total": len(TEXTS),
            "prompt_tokens_total": num_tokens,
            "request_prompt_tokens_sum": num_tokens,
            "e2e_request_latency_seconds_count": len(TEXTS),
            "generation_tokens_total": 0,
            "admission_rejections_total": 1,
        }.items():
            assert running.metric(f"jaxserve:{name}") == value, name


def test_a_device_that_breaks_is_a_500_without_a_vector():
    with RunningServer() as running:
        running.runner.breaks = True
        status, answer = running.post(PATH, {"input": TEXTS})
        assert (status, answer["error"]["type"]) == (500, "server_error")
