"""The official client, sync and async, against the server."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import openai
import pytest

from tests.server.running import MODEL, RunningServer, text_prompt

MESSAGES: list = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hello"}]


@pytest.fixture
def client(server: RunningServer) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0, timeout=30) as client:
        yield client


def test_models(client):
    assert [model.id for model in client.models.list()] == [MODEL, "second/name"]
    assert client.models.retrieve("second/name").id == "second/name"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("gpt-4")


def test_completions(client):
    answer = client.completions.create(model=MODEL, prompt=["a", "b"], max_tokens=7, seed=1)
    assert [len(choice.text) for choice in answer.choices] == [7, 7]
    assert answer.usage.total_tokens == 16
    assert answer._request_id == answer.id


def test_streamed_completions_join_to_the_whole(client):
    fields = {"model": MODEL, "prompt": "hello", "max_tokens": 20, "seed": 1}
    whole = client.completions.create(**fields)
    chunks = list(client.completions.create(**fields, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert chunks[-1].choices[0].finish_reason == "length"


def test_chat(client):
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=9)
    assert len(answer.choices[0].message.content) == 9
    assert answer.choices[0].message.refusal is None
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == 9


def test_streamed_chat_joins_to_the_whole_with_usage_at_the_end(client):
    fields = {"model": MODEL, "messages": MESSAGES, "max_tokens": 20, "seed": 1}
    whole = client.chat.completions.create(**fields)
    stream = client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert last.usage == whole.usage


def test_the_streaming_helper_of_chat_accumulates_the_answer(client):
    fields = {"model": MODEL, "messages": MESSAGES, "max_tokens": 150, "seed": 3, "stop": list("aeio")}
    whole = client.chat.completions.create(**fields)
    with client.chat.completions.stream(**fields) as stream:
        text = "".join(event.delta for event in stream if event.type == "content.delta")
        final = stream.get_final_completion()
    assert final.choices[0].message.content == text == whole.choices[0].message.content
    assert final.choices[0].finish_reason == "stop"


def test_an_answer_can_be_sent_back_as_a_message(client):
    answer = client.chat.completions.create(model=MODEL, messages=MESSAGES, max_tokens=3)
    again = [*MESSAGES, answer.choices[0].message, {"role": "user", "content": "and?"}]
    assert client.chat.completions.create(model=MODEL, messages=again, max_tokens=3).choices


def test_n_answers_arrive_whole_and_streamed_alike(client):
    fields = {"model": MODEL, "messages": MESSAGES, "max_tokens": 150, "seed": 1, "n": 3, "stop": list("aei")}
    whole = client.chat.completions.create(**fields)
    texts = [choice.message.content for choice in whole.choices]
    assert len(set(texts)) == 3
    joined = ["", "", ""]
    for chunk in client.chat.completions.create(**fields, stream=True):
        for choice in chunk.choices:
            joined[choice.index] += choice.delta.content or ""
    assert joined == texts
    with client.chat.completions.stream(**fields) as stream:
        final = stream.get_final_completion()
    assert [choice.message.content for choice in final.choices] == texts
    assert [choice.finish_reason for choice in final.choices] == ["stop"] * 3


def test_best_of_echo_and_logprobs_of_a_completion(client):
    fields = {"model": MODEL, "prompt": "hello", "max_tokens": 5, "seed": 1}
    answer = client.completions.create(**fields, n=2, best_of=4, echo=True, logprobs=1)
    for choice in answer.choices:
        assert choice.text.startswith("hello")
        assert "".join(choice.logprobs.tokens) == choice.text
        assert choice.logprobs.token_logprobs[0] is None
    assert answer.usage.completion_tokens == 20
    with pytest.raises(openai.BadRequestError, match="fill-in-the-middle"):
        client.completions.create(**fields, suffix="world")
    scored = client.completions.create(
        model=MODEL, prompt=[[9, 10, 11], [12, 13]], max_tokens=1, echo=True, logprobs=1, temperature=0
    )
    assert [len(choice.logprobs.tokens) for choice in scored.choices] == [4, 3]


def test_fields_that_openai_does_not_know_go_into_the_extra_body(client):
    extra = {"return_token_ids": True, "top_k": 5, "min_p": 0.1, "request_id": "from-extra-body"}
    answer = client.chat.completions.create(
        model=MODEL, messages=MESSAGES, max_completion_tokens=4, extra_body=extra
    )
    assert answer.id == "chatcmpl-from-extra-body"
    assert len(answer.choices[0].token_ids) == 4
    begun = [*MESSAGES, {"role": "assistant", "content": "Well, "}]
    goes_on = client.chat.completions.create(
        model=MODEL, messages=begun, max_tokens=4, extra_body={"continue_final_message": True}
    )
    assert len(goes_on.choices[0].message.content) == 4
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, store=True)
    assert (refused.value.param, refused.value.code) == ("store", "unsupported_parameter")


def test_closing_a_stream_early_ends_the_request(server, client):
    server.runner.step_s = 0.02
    stream = client.completions.create(model=MODEL, prompt="x", max_tokens=200, stream=True)
    next(iter(stream))
    stream.close()
    server.wait_idle(1.0)


def test_errors_arrive_as_the_exceptions_of_their_status(client):
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="gpt-4", prompt="x")
    assert missing.value.param == "model"
    with pytest.raises(openai.BadRequestError) as long:
        client.completions.create(model=MODEL, prompt=text_prompt(1000))
    assert long.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=-1, stream=True)
    assert wrong.value.param == "temperature"


def test_the_async_streaming_helper_accumulates_every_choice(server):
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
            fields: dict = {"model": MODEL, "messages": MESSAGES, "seed": 3, "n": 2, "stop": list("aei")}
            whole = await client.chat.completions.create(**fields)
            async with client.chat.completions.stream(
                **fields, stream_options={"include_usage": True}
            ) as stream:
                kinds = {event.type async for event in stream}
                final = await stream.get_final_completion()
            assert {"chunk", "content.delta", "content.done"} <= kinds
            assert [c.message.content for c in final.choices] == [c.message.content for c in whole.choices]
            assert final.usage.completion_tokens == whole.usage.completion_tokens > 2

    asyncio.run(run())


def test_the_async_client_runs_many_requests_at_once(server):
    async def run() -> None:
        async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:

            async def whole(i: int) -> str:
                answer = await client.completions.create(model=MODEL, prompt=f"p{i}", max_tokens=8, seed=i)
                return answer.choices[0].text

            async def streamed(i: int) -> str:
                stream = await client.completions.create(
                    model=MODEL, prompt=f"p{i}", max_tokens=8, seed=i, stream=True
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            async def chat(i: int) -> str:
                stream = await client.chat.completions.create(
                    model=MODEL, messages=MESSAGES, max_tokens=8, seed=i, stream=True
                )
                return "".join([chunk.choices[0].delta.content or "" async for chunk in stream])

            count = 12
            texts = await asyncio.gather(*map(whole, range(count)), *map(streamed, range(count)))
            assert texts[:count] == texts[count:]
            chats = await asyncio.gather(*map(chat, range(count)))
            assert chats == [await chat(i) for i in range(count)]

    asyncio.run(run())
