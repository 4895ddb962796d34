"""From what a client sends to the ids that the model continues, and back in an echo."""

from __future__ import annotations

from typing import Any

import pytest

from jaxserve.errors import RequestError
from jaxserve.server.openai import Generation, parse_chat, parse_completion
from jaxserve.tokenizer.chat import ChatTemplate
from tests.fakes import BOS, FakeTokenizer
from tests.server.running import raw_post, served_model, text_prompt
from tests.tokenizer.test_infill import tokenizer_with

SERVED = served_model()
N = SERVED.max_model_len
ENCODE = FakeTokenizer().encode
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello"}]


def completion(served: Any = SERVED, **fields: Any) -> Generation:
    return parse_completion({"prompt": "hello", **fields}, served, 0.0)


def chat(served: Any = SERVED, **fields: Any) -> Generation:
    return parse_chat({"messages": MESSAGES, **fields}, served, 0.0)


def ids_of(generation: Generation) -> list[int]:
    return list(generation.requests[0].prompt_ids)


def with_bos() -> Any:
    tokenizer = FakeTokenizer()
    tokenizer.add_bos = True
    return served_model(tokenizer=tokenizer)


def with_template(source: str, **kwargs: Any) -> Any:
    return served_model(chat_template=ChatTemplate(source, bos_token="<bos>", eos_token="<eos>"), **kwargs)


# echo


@pytest.mark.parametrize("prompt", ["hello é", ENCODE("hello é"), ["one", "two"], [[9, 10], ENCODE("xé")]])
def test_an_echo_is_the_prompt_in_front_of_each_answer(server, prompt):
    body = {"prompt": prompt, "max_tokens": 6, "seed": 1, "n": 2}
    _, plain = server.post(COMPLETIONS, body)
    _, echoed = server.post(COMPLETIONS, {**body, "echo": True})
    prompts = [prompt] if isinstance(prompt, str) or isinstance(prompt[0], int) else prompt
    texts = [p if isinstance(p, str) else FakeTokenizer().decode(p) for p in prompts]
    assert [choice["text"] for choice in echoed["choices"]] == [
        texts[i // 2] + choice["text"] for i, choice in enumerate(plain["choices"])
    ]
    assert {**echoed["usage"], "prompt_tokens_details": None} == {
        **plain["usage"], "prompt_tokens_details": None,
    }  # fmt: skip
    chunks = server.stream(COMPLETIONS, {**body, "echo": True})[:-1]
    for choice in echoed["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in mine) == choice["text"]
        assert mine[-1]["text"] == ""


@pytest.mark.parametrize("stream", [False, True])
def test_an_echo_without_a_token_is_the_prompt_alone(server, stream):
    body = {"prompt": "just this", "max_tokens": 0, "echo": True}
    if stream:
        *chunks, last, _ = server.stream(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
        choices = [chunk["choices"][0] for chunk in chunks]
        text, reason, usage = "".join(c["text"] for c in choices), choices[-1]["finish_reason"], last["usage"]
    else:
        _, answer = server.post(COMPLETIONS, body)
        [choice] = answer["choices"]
        text, reason, usage = choice["text"], choice["finish_reason"], answer["usage"]
    assert (text, reason) == ("just this", "length")
    assert (usage["completion_tokens"], usage["total_tokens"]) == (0, 9)


def test_the_special_tokens_of_an_echoed_prompt_are_shown_only_when_asked_for():
    ids = [BOS, *ENCODE("ab")]
    assert completion(prompt=ids, echo=True).echoes == ("ab",)
    assert completion(prompt=ids, echo=True, skip_special_tokens=False).echoes == ("<bos>ab",)
    assert completion(prompt="ab").echoes is None


# return_token_ids


def test_token_ids_are_returned_with_the_text(server):
    body = {"prompt": ["ab", "cde"], "max_tokens": 7, "seed": 1, "return_token_ids": True}
    _, answer = server.post(COMPLETIONS, body)
    for choice, prompt in zip(answer["choices"], body["prompt"]):
        assert choice["prompt_token_ids"] == ENCODE(prompt)
        assert FakeTokenizer().decode(choice["token_ids"]) == choice["text"]
        assert len(choice["token_ids"]) == 7
    chunks = server.stream(COMPLETIONS, body)[:-1]
    for choice in answer["choices"]:
        mine = [c["choices"][0] for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert mine[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert [i for part in mine for i in part.get("token_ids", [])] == choice["token_ids"]
    _, plain = server.post(COMPLETIONS, {**body, "return_token_ids": False})
    assert "token_ids" not in plain["choices"][0]


def test_token_ids_are_returned_with_a_chat_answer(server):
    body = {"messages": MESSAGES, "max_tokens": 7, "seed": 1, "return_token_ids": True, "n": 2}
    _, answer = server.post(CHAT, body)
    prompt_ids = list(ids_of(chat()))
    assert answer["prompt_token_ids"] == prompt_ids
    for choice in answer["choices"]:
        assert FakeTokenizer().decode(choice["token_ids"]) == choice["message"]["content"]
    chunks = server.stream(CHAT, body)[:-1]
    for choice in answer["choices"]:
        mine = [c for c in chunks if c["choices"][0]["index"] == choice["index"]]
        assert mine[0]["prompt_token_ids"] == prompt_ids
        assert [i for c in mine for i in c["choices"][0].get("token_ids", [])] == choice["token_ids"]


# truncate_prompt_tokens


def test_a_prompt_is_cut_to_its_last_tokens():
    prompt = text_prompt(20)
    assert ids_of(completion(prompt=prompt, truncate_prompt_tokens=5)) == ENCODE(prompt)[-5:]
    assert ids_of(completion(prompt=[5, 6, 7, 8], truncate_prompt_tokens=2)) == [7, 8]
    assert ids_of(completion(prompt=[5, 6], truncate_prompt_tokens=2)) == [5, 6]
    assert ids_of(chat(truncate_prompt_tokens=3)) == ids_of(chat())[-3:]


def test_a_bos_that_was_put_before_a_prompt_is_never_cut_off():
    served = with_bos()
    assert ids_of(completion(served, prompt="abcdef", truncate_prompt_tokens=3)) == [BOS, *ENCODE("ef")]
    assert ids_of(completion(served, prompt=[5, 6, 7], truncate_prompt_tokens=2)) == [6, 7]
    assert ids_of(chat(served, truncate_prompt_tokens=3)) == [BOS, *ids_of(chat())[-2:]]


def test_minus_one_cuts_to_what_leaves_room_for_the_answer():
    long = text_prompt(3 * N)
    assert len(ids_of(completion(prompt=long, truncate_prompt_tokens=-1, max_tokens=40))) == N - 40
    assert len(ids_of(completion(prompt=long, truncate_prompt_tokens=-1))) == N - 16
    messages = [{"role": "user", "content": long}]
    assert len(ids_of(chat(messages=messages, truncate_prompt_tokens=-1, max_tokens=40))) == N - 40
    assert len(ids_of(chat(messages=messages, truncate_prompt_tokens=-1))) == N - 1
    assert ids_of(completion(prompt="short", truncate_prompt_tokens=-1)) == ENCODE("short")


def test_a_cut_prompt_is_echoed_as_it_was_continued():
    assert completion(prompt="abcdef", truncate_prompt_tokens=3, echo=True).echoes == ("def",)


def test_a_number_of_kept_tokens_that_leaves_no_room_is_a_context_error():
    with pytest.raises(RequestError, match="maximum context length"):
        completion(prompt=text_prompt(2 * N), truncate_prompt_tokens=N)


# add_special_tokens


def test_bos_is_left_out_when_special_tokens_are_not_wanted():
    served = with_bos()
    assert ids_of(completion(served, prompt="ab")) == [BOS, *ENCODE("ab")]
    assert ids_of(completion(served, prompt="ab", add_special_tokens=False)) == ENCODE("ab")
    assert ids_of(chat(served))[0] == BOS
    assert ids_of(chat(served, add_special_tokens=False)) == ids_of(chat())


# suffix


def test_a_suffix_is_put_behind_the_prompt_with_the_models_own_tokens():
    tokenizer = tokenizer_with("<fim_prefix>", "<fim_suffix>", "<fim_middle>")
    served = served_model(tokenizer=tokenizer)
    pre, suf, mid = range(FakeTokenizer().vocab_size, tokenizer.vocab_size)
    expected = [pre, *ENCODE("ab"), suf, *ENCODE("xy"), mid]
    assert ids_of(completion(served, prompt="ab", suffix="xy")) == expected
    assert ids_of(completion(served, prompt=ENCODE("ab"), suffix="xy")) == expected
    assert ids_of(completion(served, prompt="ab", suffix="")) == ENCODE("ab")
    tokenizer.add_bos = True
    assert ids_of(completion(served, prompt="ab", suffix="xy")) == [BOS, *expected]
    for other in ({"echo": True}, {"truncate_prompt_tokens": 5}):
        with pytest.raises(RequestError, match="can't be combined"):
            completion(served, prompt="ab", suffix="xy", **other)


# continue_final_message and chat_template_kwargs

TURNS = (
    "{% for message in messages %}[{{ message.role }}]{{ message.content | trim }}<turn>{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_the_final_message_is_continued_where_it_ends():
    served = with_template(TURNS)
    messages = [*MESSAGES, {"role": "assistant", "content": "Well, "}]
    open_ended = chat(served, messages=messages, continue_final_message=True)
    assert ids_of(open_ended) == ENCODE("[user]hello<turn>[assistant]Well, ")
    assert ids_of(chat(served, messages=messages)) == ENCODE(
        "[user]hello<turn>[assistant]Well,<turn>[assistant]"
    )
    explicit = {"continue_final_message": True, "add_generation_prompt": False}
    assert ids_of(chat(served, messages=messages, **explicit)) == ids_of(open_ended)


def test_the_final_message_is_found_by_its_place_and_not_by_its_text():
    served = with_template(TURNS + "said: {{ messages[-1].content }} and hello")
    messages = [*MESSAGES, {"role": "assistant", "content": "hello"}]
    rendered = FakeTokenizer().decode(
        ids_of(chat(served, messages=messages, continue_final_message=True)), skip_special=False
    )
    assert rendered == "[user]hello<turn>[assistant]hello<turn>said: hello"


def test_a_template_that_hides_the_final_message_can_not_continue_it():
    served = with_template("{{ messages[0].content }}")
    messages = [*MESSAGES, {"role": "assistant", "content": "x"}]
    with pytest.raises(RequestError, match="does not show the final message") as caught:
        chat(served, messages=messages, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_a_continued_message_is_answered_with_what_comes_after_it(server):
    messages = [*MESSAGES, {"role": "assistant", "content": "Well, "}]
    body = {"messages": messages, "continue_final_message": True, "max_tokens": 5, "seed": 1}
    _, answer = server.post(CHAT, body)
    assert answer["choices"][0]["message"]["role"] == "assistant"
    assert len(answer["choices"][0]["message"]["content"]) == 5


def test_variables_of_the_template_are_the_clients_to_set():
    served = with_template("{{ messages[0].content }}{% if thinking is defined %}:{{ thinking }}{% endif %}")
    assert ids_of(chat(served)) == ENCODE("hello")
    assert ids_of(chat(served, chat_template_kwargs={"thinking": "on"})) == ENCODE("hello:on")
    for name in ("thinkng", "messages", "bos_token", "add_generation_prompt", "tools", "raise_exception"):
        with pytest.raises(RequestError, match="variables that can be set: thinking") as caught:
            chat(served, chat_template_kwargs={name: 1})
        assert caught.value.param == "chat_template_kwargs"


# labels


def test_labels_and_hints_change_nothing(server):
    labels = {"user": "u", "safety_identifier": "s", "metadata": {"a": "b"}, "prompt_cache_key": "k",
              "store": False, "service_tier": "auto"}  # fmt: skip
    for path, prompt in ((COMPLETIONS, {"prompt": "x"}), (CHAT, {"messages": MESSAGES})):
        body = {**prompt, "max_tokens": 9, "seed": 2}
        plain, labelled = server.post(path, body)[1], server.post(path, {**body, **labels})[1]
        strip = {"id": None, "created": None, "usage": None}
        assert {**plain, **strip} == {**labelled, **strip}


def test_an_id_of_the_clients_own_is_a_part_of_the_answers_id_and_taken_once_at_a_time(server):
    body = {"prompt": ["x", "y"], "max_tokens": 3, "request_id": "mine.1"}
    status, headers, _ = server.request("POST", COMPLETIONS, body)
    assert (status, headers["X-Request-Id"]) == (200, "cmpl-mine.1")
    assert server.post(COMPLETIONS, body)[1]["id"] == "cmpl-mine.1"
    server.runner.hold()
    with server.connect() as connection:
        connection.sendall(raw_post(COMPLETIONS, body))
        server.wait(lambda: server.server.num_open == 2)
        status, answer = server.post(COMPLETIONS, body)
        assert (status, answer["error"]["param"]) == (400, "request_id")
        server.runner.release()
        assert connection.recv(12) == b"HTTP/1.1 200"


def test_a_name_is_handed_to_the_chat_template():
    served = with_template("{% for m in messages %}{{ m.name }}:{{ m.content }} {% endfor %}")
    messages = [{"role": "user", "name": "Ann", "content": "hi"}, {"role": "user", "content": "x"}]
    assert ids_of(chat(served, messages=messages)) == ENCODE("Ann:hi :x ")
