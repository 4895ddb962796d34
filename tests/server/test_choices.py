"""Several answers to a prompt, and several prompts in a request: indexes, seeds, usage, work, ends."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest

from jaxserve.server.openai import parse_chat, parse_completion, sibling_seed
from jaxserve.server.render import renderer
from jaxserve.types import Event, TokenLogprobs
from tests.server.running import RunningServer, served_model, text_prompt

SERVED = served_model()
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "hello, how are you today?"}]


def num_prefilled(server: RunningServer) -> int:
    """Prompt tokens that the device has worked on so far."""
    steps = [step for plan in server.runner.plans for step in plan.steps if step.kind == "prefill"]
    return sum(row.query_len for step in steps for row in step.rows)


def text_of(choice: dict[str, Any]) -> str:
    return choice["text"] if "text" in choice else choice["message"]["content"]


@pytest.mark.parametrize(
    ("path", "prompt"), [(COMPLETIONS, {"prompt": text_prompt(18)}), (CHAT, {"messages": MESSAGES})]
)
def test_n_answers_differ_repeat_under_a_seed_and_the_first_is_that_of_n_1(server, path, prompt):
    body = {**prompt, "max_tokens": 12, "seed": 5}
    _, alone = server.post(path, body)
    _, several = server.post(path, {**body, "n": 4})
    _, again = server.post(path, {**body, "n": 4})
    texts = [text_of(choice) for choice in several["choices"]]
    assert texts == [text_of(choice) for choice in again["choices"]]
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert texts[0] == text_of(alone["choices"][0])
    assert len(set(texts)) == 4
    assert several["usage"]["prompt_tokens"] == alone["usage"]["prompt_tokens"]
    assert several["usage"]["completion_tokens"] == 48
    assert several["usage"]["total_tokens"] == several["usage"]["prompt_tokens"] + 48


def test_without_a_seed_n_answers_differ_from_each_other_and_from_those_of_the_next_request(server):
    body = {"prompt": "x", "max_tokens": 12, "n": 3}
    answers = [server.post(COMPLETIONS, body)[1] for _ in range(2)]
    assert len({choice["text"] for answer in answers for choice in answer["choices"]}) == 6


def test_n_answers_cost_one_prefill_of_the_prompt(server):
    before = num_prefilled(server)
    _, answer = server.post(COMPLETIONS, {"prompt": "Zq" * 50 + "y", "max_tokens": 5, "n": 4})
    # Of the 101 tokens 100 fill pages of four; the last one is computed for each answer.
    assert num_prefilled(server) - before == 100 + 4
    assert answer["usage"]["prompt_tokens"] == 101
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0


def test_with_batched_prompts_the_index_is_prompt_times_n_plus_choice(server):
    body = {"prompt": ["first one", "the second"], "max_tokens": 9, "seed": 3}
    _, answer = server.post(COMPLETIONS, {**body, "n": 3})
    alone = [server.post(COMPLETIONS, {**body, "prompt": p, "n": 3})[1] for p in body["prompt"]]
    assert [choice["index"] for choice in answer["choices"]] == list(range(6))
    assert [choice["text"] for choice in answer["choices"]] == [
        choice["text"] for one in alone for choice in one["choices"]
    ]
    assert answer["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)
    assert answer["usage"]["completion_tokens"] == 54


def test_streamed_choices_join_to_the_whole_ones_and_each_ends_once(server):
    body = {"prompt": ["first one", "the second"], "max_tokens": 30, "seed": 3, "n": 3, "stop": ["a", "e"]}
    _, whole = server.post(COMPLETIONS, body)
    *chunks, usage, done = server.stream(COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
    assert done == "[DONE]"
    for expected in whole["choices"]:
        mine = [
            chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == expected["index"]
        ]
        assert "".join(choice["text"] for choice in mine) == expected["text"]
        *before, last = (choice["finish_reason"] for choice in mine)
        assert (set(before) <= {None}, last) == (True, expected["finish_reason"])
        assert mine[-1]["stop_reason"] == expected["stop_reason"]
    assert {chunk["choices"][0]["index"] for chunk in chunks} == set(range(6))
    assert usage["choices"] == []
    for name in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert usage["usage"][name] == whole["usage"][name]


def test_each_streamed_chat_choice_opens_with_its_own_role(server):
    chunks = server.stream(CHAT, {"messages": MESSAGES, "max_tokens": 4, "n": 3})[:-1]
    for index in range(3):
        mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
        assert mine[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in choice["delta"] for choice in mine[1:])
        assert mine[-1]["delta"] == {}
        assert [choice["finish_reason"] for choice in mine if choice["finish_reason"]] == ["length"]


def test_continuous_usage_grows_in_every_choice(server):
    body = {"prompt": "xyz", "max_tokens": 6, "n": 2}
    options = {"continuous_usage_stats": True, "include_usage": True}
    *chunks, last, _ = server.stream(COMPLETIONS, {**body, "stream_options": options})
    for index in range(2):
        counts = [c["usage"] for c in chunks if c["choices"][0]["index"] == index]
        assert all(count["prompt_tokens"] == 3 for count in counts)
        assert all(a["completion_tokens"] <= b["completion_tokens"] for a, b in pairwise(counts))
        assert counts[-1]["completion_tokens"] == 6
    assert last["usage"]["completion_tokens"] == 12


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_ends_all_siblings(server, stream):
    server.runner.hold()
    with server.connect() as connection:
        body = json.dumps({"prompt": ["x", "y"], "n": 8, "max_tokens": 200, "stream": stream}).encode()
        head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        server.wait(lambda: server.server.num_open == 16)
    server.runner.release()
    server.wait_idle()
    assert server.engine.stats().num_pages_used == 0


def test_a_request_whose_answers_do_not_fit_into_the_queue_leaves_nothing_behind(server):
    status, answer = server.post(COMPLETIONS, {"prompt": "x", "n": 128, "max_tokens": 5})
    assert (status, answer["error"]["code"]) == (429, "queue_full")
    server.wait_idle()


def test_seeds_of_siblings_are_distinct_and_no_neighbours():
    seeds = [sibling_seed(seed, i) for seed in range(20) for i in range(50)]
    assert len(set(seeds)) == 1000
    assert all(0 <= seed < 2**64 for seed in seeds)
    assert sibling_seed(7, 0) == 7


def test_siblings_are_one_group_and_prompts_are_several():
    generation = parse_completion({"prompt": ["a", "b"], "n": 2}, SERVED, 0.0)
    groups = [request.group for request in generation.requests]
    assert groups[0] == groups[1] != groups[2] == groups[3]
    assert None not in groups
    assert [request.group for request in parse_completion({"prompt": ["a", "b"]}, SERVED, 0.0).requests] == [
        None, None,
    ]  # fmt: skip
    assert parse_chat({"messages": MESSAGES, "n": 2}, SERVED, 0.0).requests[1].group is not None


def candidate(index: int, *logprobs: float, text: str) -> tuple[int, Event]:
    tokens = tuple(TokenLogprobs(5, logprob, 1, (), ()) for logprob in logprobs)
    return index, Event(
        "id", 0.0, (5,) * len(tokens), text, "length", num_output_tokens=len(tokens), logprobs=tokens
    )


def test_best_of_gives_the_likeliest_answers_of_each_prompt_first():
    generation = parse_completion({"prompt": ["a", "b"], "n": 2, "best_of": 3}, SERVED, 0.0)
    assert len(generation.requests) == 6
    assert all(request.params.logprobs == 0 for request in generation.requests)
    answer = renderer(generation)
    for index, event in (
        candidate(0, -1.0, -1.0, text="second"),
        candidate(1, -0.5, -3.0, text="worst"),
        candidate(2, -1.5, -0.25, text="best"),
        candidate(3, -1.0, text="B"),
        candidate(4, -0.5, text="A"),
        candidate(5, -2.0, text="C"),
    ):
        answer.collect(index, event)
    body = json.loads(answer.response())
    assert [(c["index"], c["text"]) for c in body["choices"]] == [
        (0, "best"), (1, "second"), (2, "A"), (3, "B"),
    ]  # fmt: skip
    assert all(choice["logprobs"] is None for choice in body["choices"])
    assert body["usage"] == {
        "prompt_tokens": 2, "completion_tokens": 9, "total_tokens": 11,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip


def test_best_of_equal_to_n_ranks_nothing_and_may_be_streamed():
    generation = parse_completion({"prompt": "a", "n": 2, "best_of": 2, "stream": True}, SERVED, 0.0)
    assert [request.params.logprobs for request in generation.requests] == [None, None]


def test_best_of_generates_all_candidates_and_gives_those_with_the_highest_sums(server):
    body = {"prompt": ["rank me", "me too"], "max_tokens": 8, "seed": 6, "logprobs": 0}
    _, every = server.post(COMPLETIONS, {**body, "n": 5})
    _, best = server.post(COMPLETIONS, {**body, "n": 2, "best_of": 5})
    for prompt in range(2):
        candidates = every["choices"][5 * prompt : 5 * prompt + 5]
        candidates.sort(key=lambda choice: -sum(choice["logprobs"]["token_logprobs"]))
        chosen = best["choices"][2 * prompt : 2 * prompt + 2]
        assert [c["text"] for c in chosen] == [c["text"] for c in candidates[:2]]
        assert [c["logprobs"] for c in chosen] == [c["logprobs"] for c in candidates[:2]]
    assert [choice["index"] for choice in best["choices"]] == [0, 1, 2, 3]
    assert best["usage"]["completion_tokens"] == 80
    assert best["usage"]["prompt_tokens"] == every["usage"]["prompt_tokens"]


def test_the_logprobs_of_an_echoed_prompt_are_computed_once_for_all_choices(server):
    body = {"prompt": "Echo this" * 5, "echo": True, "logprobs": 1, "max_tokens": 4, "seed": 1}
    _, one = server.post(COMPLETIONS, body)
    before = num_prefilled(server)
    _, three = server.post(COMPLETIONS, {**body, "n": 3, "cache_salt": "fresh"})
    num_prompt = one["usage"]["prompt_tokens"]
    shared = (num_prompt - 1) // 4 * 4
    assert num_prefilled(server) - before == shared + 3 * (num_prompt - shared)
    chunks = server.stream(COMPLETIONS, {**body, "n": 3})[:-1]
    for index in range(3):
        arrays = three["choices"][index]["logprobs"]
        assert len(arrays["tokens"]) == num_prompt + 4
        for name, values in one["choices"][0]["logprobs"].items():
            assert arrays[name][:num_prompt] == values[:num_prompt]
        mine = [c["choices"][0]["logprobs"] for c in chunks if c["choices"][0]["index"] == index]
        joined = [value for part in mine if part for value in part["token_logprobs"]]
        assert joined == arrays["token_logprobs"]
