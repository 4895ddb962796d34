from __future__ import annotations

from typing import Any

import pytest

from jaxserve.errors import ContextLengthError, ModelNotFoundError, RequestError
from jaxserve.server.openai import Generation, parse_chat, parse_completion
from jaxserve.server.schema import REFUSED_CHAT, REFUSED_COMPLETION, ChatBody, CompletionBody
from jaxserve.tokenizer.chat import ChatTemplate
from jaxserve.types import SamplingParams
from tests.fakes import BOS, FakeTokenizer
from tests.server.running import MODEL, served_model, text_prompt

SERVED = served_model()
MESSAGES = [{"role": "user", "content": "hello"}]
N = SERVED.max_model_len


def completion(**fields: Any) -> Generation:
    return parse_completion({"prompt": "hello", **fields}, SERVED, 0.0)


def chat(**fields: Any) -> Generation:
    return parse_chat({"messages": MESSAGES, **fields}, SERVED, 0.0)


def params(**fields: Any) -> SamplingParams:
    return completion(**fields).requests[0].params


# (fields, the field that is named, a part of the text)
WRONG_IN_BOTH: list[tuple[dict[str, Any], str, str]] = [
    ({"max_tokens": -1}, "max_tokens", ", got -1"),
    ({"max_tokens": 0}, "max_tokens", "at least 1, got 0"),
    ({"max_tokens": 1.5}, "max_tokens", "an integer, got 1.5"),
    ({"max_tokens": "5"}, "max_tokens", "an integer"),
    ({"max_tokens": True}, "max_tokens", "an integer, got true"),
    ({"max_tokens": 10**4000}, "max_tokens", "less than"),
    ({"max_tokens": N}, "max_tokens", f"maximum context length is {N} tokens"),
    ({"temperature": -1}, "temperature", "at least 0, got -1"),
    ({"temperature": 2.5}, "temperature", "at most 2, got 2.5"),
    ({"temperature": float("nan")}, "temperature", "finite"),
    ({"temperature": float("inf")}, "temperature", "finite"),
    ({"temperature": "hot"}, "temperature", 'a number, got "hot"'),
    ({"temperature": [1]}, "temperature", "a number"),
    ({"temperature": 10**400}, "temperature", "a number"),
    ({"top_p": -0.1}, "top_p", "at least 0"),
    ({"top_p": 1.1}, "top_p", "at most 1"),
    ({"top_k": -2}, "top_k", "at least -1"),
    ({"top_k": 2.5}, "top_k", "an integer"),
    ({"min_p": 2}, "min_p", "at most 1"),
    ({"seed": 2**64}, "seed", "less than 18446744073709551616"),
    ({"seed": "7"}, "seed", "an integer"),
    ({"stop": ""}, "stop", "empty string"),
    ({"stop": [""]}, "stop", "empty string"),
    ({"stop": ["a", "", "b"]}, "stop", "empty string"),
    ({"stop": list("abcde")}, "stop", "has 5 strings, at most 4"),
    ({"stop": [1]}, "stop", "a string or a list"),
    ({"stop": {"a": 1}}, "stop", "a string or a list"),
    ({"stop": "x" * 2000}, "stop", "longer than 1024"),
    ({"stop_token_ids": [SERVED.vocab_size]}, "stop_token_ids[0]", "outside of the vocabulary"),
    ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]", "at least 0"),
    ({"stop_token_ids": ["a"]}, "stop_token_ids[0]", "an integer"),
    ({"stop_token_ids": 5}, "stop_token_ids", "a list"),
    ({"stop_token_ids": [3] * 100}, "stop_token_ids", "at most 64 items"),
    ({"ignore_eos": 1}, "ignore_eos", "true or false, got 1"),
    ({"ignore_eos": "yes"}, "ignore_eos", "true or false"),
    ({"include_stop_str_in_output": 0}, "include_stop_str_in_output", "true or false"),
    ({"skip_special_tokens": []}, "skip_special_tokens", "true or false"),
    ({"stream": "true"}, "stream", "true or false"),
    ({"stream_options": {"include_usage": True}}, "stream_options", "only allowed when 'stream' is true"),
    ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", "true or"),
    ({"stream": True, "stream_options": []}, "stream_options", "an object"),
    ({"user": 5}, "user", "a string"),
    ({"safety_identifier": 5}, "safety_identifier", "a string"),
    ({"prompt_cache_key": 5}, "prompt_cache_key", "a string"),
    ({"metadata": {"a": 5}}, "metadata.a", "a string"),
    ({"metadata": {str(i): "x" for i in range(17)}}, "metadata", "at most 16 items, got 17"),
    ({"request_id": "a b"}, "request_id", "must match"),
    ({"request_id": "x" * 129}, "request_id", "must match"),
    ({"request_id": ""}, "request_id", "must match"),
    ({"n": 0}, "n", "at least 1, got 0"),
    ({"n": 129}, "n", "at most 128, got 129"),
    ({"n": True}, "n", "an integer, got true"),
    ({"n": 1.5}, "n", "an integer"),
    ({"return_token_ids": 1}, "return_token_ids", "true or false"),
    ({"add_special_tokens": 1}, "add_special_tokens", "true or false"),
    ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens", "from 1 to"),
    ({"truncate_prompt_tokens": -2}, "truncate_prompt_tokens", "at least -1"),
    ({"truncate_prompt_tokens": N + 1}, "truncate_prompt_tokens", f"context length of {N} tokens"),
    ({"stream": True, "stream_options": {"include_obfuscation": True}},
     "stream_options.include_obfuscation", "must be False"),
    ({"priority": 1.5}, "priority", "an integer"),
    ({"priority": 2000}, "priority", "at most 1000"),
    ({"timeout": 0}, "timeout", "more than 0"),
    ({"timeout": "5"}, "timeout", "a number"),
    ({"cache_salt": 5}, "cache_salt", "a string"),
    ({"cache_salt": ""}, "cache_salt", "at least 1 characters"),
    ({"cache_salt": "x" * 300}, "cache_salt", "at most 256 characters"),
    ({"model": 5}, "model", "a string"),
]
WRONG_COMPLETIONS: list[tuple[dict[str, Any], str, str]] = [
    ({"prompt": None}, "prompt", "is required"),
    ({"prompt": ""}, "prompt", "must not be empty"),
    ({"prompt": []}, "prompt", "must not be empty"),
    ({"prompt": [""]}, "prompt", "must not be empty"),
    ({"prompt": ["a", ""]}, "prompt", "must not be empty"),
    ({"prompt": [[]]}, "prompt", "must not be empty"),
    ({"prompt": [[5], []]}, "prompt", "must not be empty"),
    ({"prompt": 5}, "prompt", "expected a string"),
    ({"prompt": {"a": 1}}, "prompt", "expected a string"),
    ({"prompt": [1.0, 2.0]}, "prompt", "expected a string"),
    ({"prompt": [True]}, "prompt", "expected a string"),
    ({"prompt": ["a", 5]}, "prompt", "expected a string"),
    ({"prompt": [[5], 5]}, "prompt", "expected a string"),
    ({"prompt": [["a"]]}, "prompt", "expected a string"),
    ({"prompt": [None]}, "prompt", "expected a string"),
    ({"prompt": [-1]}, "prompt", "token id -1, outside of the vocabulary"),
    ({"prompt": [5, SERVED.vocab_size]}, "prompt", "outside of the vocabulary"),
    ({"prompt": [10**4000]}, "prompt", "outside of the vocabulary"),
    ({"prompt": ["a"] * 1025}, "prompt", "at most 1024"),
    ({"prompt": text_prompt(N)}, "prompt", f"maximum context length is {N} tokens"),
    ({"prompt": "a" * 3_000_000}, "prompt", f"maximum context length is {N} tokens"),
    ({"prompt": [5] * N}, "prompt", f"maximum context length is {N} tokens"),
    ({"prompt": text_prompt(N - 1), "max_tokens": 2}, "max_tokens", "set 'max_tokens' to 1 or less"),
    ({"prompt": ["a"] * 513, "n": 2}, "n", "make 1026 answers, at most 1024"),
    ({"prompt": ["a"] * 9, "best_of": 120}, "best_of", "make 1080 answers, at most 1024"),
    ({"best_of": 0}, "best_of", "at least 1"),
    ({"best_of": 129}, "best_of", "at most 128"),
    ({"best_of": 2, "n": 3}, "best_of", "at least 'n', got best_of=2 and n=3"),
    ({"best_of": 2, "stream": True}, "best_of", "can't be streamed"),
    ({"echo": 1}, "echo", "true or false"),
    ({"suffix": 5}, "suffix", "a string"),
    ({"suffix": "x"}, "suffix", "fill-in-the-middle tokens"),
]
WRONG_CHATS: list[tuple[dict[str, Any], str, str]] = [
    ({"messages": None}, "messages", "is required"),
    ({"messages": []}, "messages", "at least 1 item"),
    ({"messages": "hello"}, "messages", "a list"),
    ({"messages": ["hello"]}, "messages[0]", "an object"),
    ({"messages": [{"content": "x"}]}, "messages[0].role", "is required"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role", "'system', 'developer', 'user'"),
    ({"messages": [{"role": 5, "content": "x"}]}, "messages[0].role", "'user'"),
    ({"messages": [*MESSAGES, {"role": "user", "content": 5}]}, "messages[1].content", "expected a string"),
    ({"messages": [{"role": "user", "content": ["x"]}]}, "messages[0].content", "part 0"),
    (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content",
        'part 0 has type "image_url"',
    ),
    ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content", "part 0"),
    ({"messages": [{"role": "assistant", "tool_calls": [{"id": "x"}]}]},
     "messages[0].tool_calls[0].function", "required"),
    ({"messages": [{"role": "user", "content": "refuse me"}]}, "messages", "no"),
    ({"messages": [{"role": "user", "content": text_prompt(N)}]}, "messages", f"context length is {N}"),
    ({"messages": [{"role": "user", "content": "b" * 3_000_000}]}, "messages", f"context length is {N}"),
    ({"max_completion_tokens": 0}, "max_completion_tokens", "at least 1"),
    ({"max_completion_tokens": N}, "max_completion_tokens", f"maximum context length is {N} tokens"),
    ({"add_generation_prompt": "no"}, "add_generation_prompt", "true or false"),
    ({"continue_final_message": 1}, "continue_final_message", "true or false"),
    ({"continue_final_message": True}, "continue_final_message", 'the final message is by "user"'),
    (
        {"continue_final_message": True, "messages": [{"role": "assistant", "content": ""}]},
        "continue_final_message",
        "has no text",
    ),
    (
        {"continue_final_message": True, "add_generation_prompt": True},
        "continue_final_message",
        "can't both be true",
    ),
    ({"chat_template_kwargs": []}, "chat_template_kwargs", "an object"),
    ({"chat_template_kwargs": {"unheard_of": 1}}, "chat_template_kwargs", '"unheard_of"'),
    ({"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs", '"messages"'),
    ({"chat_template_kwargs": {"range": 1}}, "chat_template_kwargs", '"range"'),
]


@pytest.mark.parametrize(("fields", "param", "text"), WRONG_IN_BOTH + WRONG_COMPLETIONS)
def test_a_wrong_completion_field_is_an_error_that_names_field_and_limit(fields, param, text):
    with pytest.raises(RequestError) as caught:
        completion(**fields)
    assert (caught.value.param, caught.value.status) == (param, 400)
    assert text in caught.value.message
    assert len(caught.value.message) < 600


@pytest.mark.parametrize(("fields", "param", "text"), WRONG_IN_BOTH + WRONG_CHATS)
def test_a_wrong_chat_field_is_an_error_that_names_field_and_limit(fields, param, text):
    with pytest.raises(RequestError) as caught:
        chat(**fields)
    assert (caught.value.param, caught.value.status) == (param, 400)
    assert text in caught.value.message


ASKS_FOR_SOMETHING: dict[str, Any] = {
    "best_of": 3, "prompt_logprobs": 1,
    "response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"},
    "use_beam_search": True, "length_penalty": 0.5, "early_stopping": True, "logits_processors": ["x"],
    "mm_processor_kwargs": {"a": 1}, "kv_transfer_params": {"a": 1}, "store": True, "service_tier": "flex",
    "prediction": {"type": "content"}, "web_search_options": {}, "reasoning_effort": "low",
    "verbosity": "low", "echo": True, "suffix": "x", "logprobs": 1,
    "top_logprobs": 2, "tools": [{"type": "function"}], "tool_choice": "required", "functions": [{}],
    "parallel_tool_calls": 1, "function_call": {"name": "x"},
    "documents": [{}],
    "modalities": ["audio"], "audio": {"voice": "x"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("parse", "name", "neutral"),
    [(completion, *item) for item in REFUSED_COMPLETION.items()]
    + [(chat, *item) for item in REFUSED_CHAT.items()],
)
def test_a_known_field_that_is_not_honoured_is_refused_by_name_unless_it_asks_for_nothing(
    parse, name, neutral
):
    for value in (None, *neutral):
        parse(**{name: value})
    value = False if neutral == (True,) else ASKS_FOR_SOMETHING[name]
    with pytest.raises(RequestError, match="not supported") as caught:
        parse(**{name: value})
    assert caught.value.param == name


def test_true_is_not_taken_for_the_neutral_number_one():
    with pytest.raises(RequestError, match="'length_penalty'"):
        completion(length_penalty=True)


def test_fields_nobody_has_heard_of_are_ignored():
    assert params(frobnicate=[1], seed=1) == params(seed=1)


@pytest.mark.parametrize("model", [CompletionBody, ChatBody])
def test_null_means_the_default_of_every_optional_field(model):
    parse = completion if model is CompletionBody else chat
    optional = {name for name, field in model.model_fields.items() if not field.is_required()}
    given_seed = {"seed": 7}
    expected = parse(**given_seed)
    for name in optional - {"seed"}:
        got = parse(**{**given_seed, name: None})
        assert got.requests[0].params == expected.requests[0].params, name
        assert (got.stream, got.model) == (expected.stream, expected.model)


@pytest.mark.parametrize("parse", [completion, chat])
def test_fields_for_the_engine_itself_reach_it(parse):
    (request,) = parse(priority=-3, timeout=2.5, cache_salt="tenant").requests
    assert (request.priority, request.timeout_s, request.cache_salt) == (-3, 2.5, "tenant")
    (request,) = parse().requests
    assert (request.priority, request.timeout_s, request.cache_salt) == (0, None, None)


def test_completions_generate_16_tokens_unless_told_otherwise():
    assert params().max_tokens == 16
    assert params(max_tokens=None).max_tokens == 16
    assert params(max_tokens=40.0).max_tokens == 40


def test_the_default_shrinks_to_what_the_context_leaves():
    assert completion(prompt=text_prompt(N - 3)).requests[0].params.max_tokens == 3


def test_what_is_asked_may_fill_the_context_to_the_last_token_and_not_one_more():
    prompt = text_prompt(N - 10)
    assert completion(prompt=prompt, max_tokens=10).requests[0].params.max_tokens == 10
    with pytest.raises(ContextLengthError, match=f"requested {N + 1} tokens") as caught:
        completion(prompt=prompt, max_tokens=11)
    assert caught.value.code == "context_length_exceeded"


def test_a_chat_may_use_the_rest_of_the_context_and_max_completion_tokens_beats_max_tokens():
    request = chat().requests[0]
    assert request.params.max_tokens == N - len(request.prompt_ids)
    assert chat(max_tokens=3).requests[0].params.max_tokens == 3
    assert chat(max_tokens=3, max_completion_tokens=5).requests[0].params.max_tokens == 5


def test_every_sampling_field_reaches_the_engine():
    assert params(
        max_tokens=3, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, seed=5, stop=["a", "b"],
        stop_token_ids=[7, 8], ignore_eos=True, include_stop_str_in_output=True, skip_special_tokens=False,
    ) == SamplingParams(
        max_tokens=3, temperature=0.5, top_k=7, top_p=0.9, min_p=0.1, seed=5, stop=("a", "b"),
        stop_token_ids=frozenset({7, 8}), ignore_eos=True, include_stop_str_in_output=True,
        skip_special_tokens=False,
    )  # fmt: skip


def test_the_edges_of_the_ranges_are_taken():
    assert params(top_k=-1).top_k == params(top_k=0).top_k == 0
    assert params(temperature=0).temperature == params(temperature=1e-30).temperature == 0
    assert params(temperature=2).temperature == 2
    assert 0 < params(top_p=0).top_p < 1e-5
    assert params(seed=2**64 - 1).seed == params(seed=-1).seed == 2**64 - 1
    assert params(stop="x").stop == ("x",)
    assert params(stop=[]).stop == ()


def test_a_seed_is_drawn_for_each_request_that_has_none():
    assert len({params().seed for _ in range(20)}) == 20


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [[FakeTokenizer().encode("ab")]]),
        (["x", "y"], [[FakeTokenizer().encode("x")], [FakeTokenizer().encode("y")]]),
        ([5, 6, 7], [[[5, 6, 7]]]),
        ([[5, 6], [7]], [[[5, 6]], [[7]]]),
    ],
)
def test_a_prompt_may_be_text_texts_ids_or_lists_of_ids(prompt, expected):
    generation = completion(prompt=prompt)
    assert [list(request.prompt_ids) for request in generation.requests] == [ids for [ids] in expected]
    assert len({request.request_id for request in generation.requests}) == len(expected)


def test_bos_is_put_before_text_once_and_never_before_ids():
    tokenizer = FakeTokenizer()
    tokenizer.add_bos = True
    served = served_model(tokenizer=tokenizer)

    def ids(prompt: object) -> tuple[int, ...]:
        return parse_completion({"prompt": prompt}, served, 0.0).requests[0].prompt_ids

    text_ids = tuple(tokenizer.encode("hi"))
    assert ids("hi") == (BOS, *text_ids)
    assert ids("<bos>hi") == (BOS, *text_ids)
    assert ids(list(text_ids)) == text_ids


def test_a_chat_template_that_writes_bos_does_not_make_it_two():
    tokenizer = FakeTokenizer()
    tokenizer.add_bos = True
    for source in ("{{ bos_token }}{{ messages[0].content }}", "{{ messages[0].content }}"):
        template = ChatTemplate(source, bos_token="<bos>", eos_token="<eos>")
        served = served_model(tokenizer=tokenizer, chat_template=template)
        ids = parse_chat({"messages": MESSAGES}, served, 0.0).requests[0].prompt_ids
        assert ids == (BOS, *tokenizer.encode("hello"))


def test_content_may_be_a_string_text_parts_or_null():
    def ids(content: object) -> tuple[int, ...]:
        return chat(messages=[{"role": "user", "content": content}]).requests[0].prompt_ids

    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert ids(parts) == ids("one\ntwo")
    assert ids(None) == ids("") == chat(messages=[{"role": "user"}]).requests[0].prompt_ids


def test_an_answer_can_be_sent_back_as_a_message():
    answer = {"role": "assistant", "content": "x", "refusal": None, "annotations": [], "tool_calls": None,
              "function_call": None, "audio": None}  # fmt: skip
    chat(messages=[*MESSAGES, answer, *MESSAGES])


def test_developer_is_the_newer_name_of_system():
    def ids(role: str) -> tuple[int, ...]:
        return chat(messages=[{"role": role, "content": "x"}, *MESSAGES]).requests[0].prompt_ids

    assert ids("developer") == ids("system") != ids("user")


def test_the_generation_prompt_can_be_left_out():
    with_prompt, without = chat().requests[0], chat(add_generation_prompt=False).requests[0]
    assert with_prompt.prompt_ids[: len(without.prompt_ids)] == without.prompt_ids != with_prompt.prompt_ids


def test_a_chat_with_a_base_model_says_what_to_do():
    with pytest.raises(RequestError, match="/v1/completions"):
        parse_chat({"messages": MESSAGES}, served_model(chat_template=None), 0.0)


def test_every_served_name_answers_by_itself_and_others_are_not_found():
    assert completion().model == completion(model=None).model == MODEL
    assert completion(model="second/name").model == "second/name"
    for name in ("gpt-4", ""):
        with pytest.raises(ModelNotFoundError) as caught:
            completion(model=name)
        assert (caught.value.status, caught.value.param) == (404, "model")
