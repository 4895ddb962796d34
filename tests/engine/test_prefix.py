"""Pages that are found again: what is shared, what never is, and what that changes (nothing but the work)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine import prefix
from jaxserve.engine.prefix import Chain, PrefixCache
from jaxserve.types import SamplingParams
from tests.engine.test_serving import Served, config, request
from tests.fakes import FakeModel

MODEL = FakeModel()
PROMPT = tuple(range(10, 50))  # ten pages of four


def run(
    served: Served, number: int, prompt: tuple[int, ...], max_tokens: int = 3, salt: str | None = None
) -> int:
    """Serve one request alone, check its ids, and return how many tokens the cache gave."""
    params = SamplingParams(max_tokens, seed=number)
    served.engine.submit(request(number, prompt, params, salt))
    served.run()
    events = served.events[str(number)]
    assert [i for event in events for i in event.token_ids] == MODEL.alone(prompt, params)
    return events[-1].num_cached_tokens


def test_a_prompt_that_comes_again_is_computed_from_its_last_page_on():
    served = Served(config(), MODEL)
    assert run(served, 0, PROMPT) == 0
    assert run(served, 1, PROMPT) == 36  # the tenth page holds the last token, which is always computed
    assert run(served, 2, (*PROMPT, 7)) == 40
    stats = served.engine.stats()
    assert (stats.num_queried_tokens, stats.num_hit_tokens) == (121, 76)
    assert (stats.num_pages_used, stats.num_pages_cached > 0) == (0, True)
    (first,) = served.runner.plans[-3].steps[0].rows
    assert (first.start, first.query_len, first.first_page, len(first.new_pages)) == (40, 1, 0, 11)


def test_a_prompt_that_differs_early_shares_only_what_is_before():
    served = Served(config(), MODEL)
    run(served, 0, PROMPT)
    assert run(served, 1, (*PROMPT[:17], 7, *PROMPT[18:])) == 16
    assert run(served, 2, (7, *PROMPT[1:])) == 0


def test_what_was_generated_is_found_again_by_the_next_turn_of_a_conversation():
    for max_tokens in range(1, 12):
        served = Served(config(), MODEL)
        run(served, 0, PROMPT, max_tokens)
        answer = tuple(MODEL.alone(PROMPT, SamplingParams(max_tokens, seed=0)))
        # The last token was sampled but never fed, so it has no place in the cache.
        in_cache = (len(PROMPT) + max_tokens - 1) // 4 * 4
        assert run(served, 1, (*PROMPT, *answer, 7, 8, 9)) == in_cache


def test_tenants_with_different_salts_share_nothing():
    served = Served(config(), MODEL)
    assert run(served, 0, PROMPT, salt="a") == 0
    assert run(served, 1, PROMPT, salt="b") == 0
    assert run(served, 2, PROMPT) == 0
    assert [run(served, 3 + n, PROMPT, salt=salt) for n, salt in enumerate(("a", "b", None))] == [36] * 3


def test_without_the_cache_nothing_is_found():
    served = Served(config(enable_prefix_caching=False), MODEL)
    run(served, 0, PROMPT)
    assert run(served, 1, PROMPT) == 0
    stats = served.engine.stats()
    assert (stats.num_pages_cached, stats.num_queried_tokens) == (0, 0)


def test_hits_end_at_a_multiple_of_the_alignment():
    served = Served(config(prefix_alignment=16), MODEL)
    run(served, 0, PROMPT)
    assert run(served, 1, PROMPT) == 32
    assert run(served, 2, PROMPT[:32]) == 16
    assert run(served, 3, PROMPT[:33]) == 32


def test_equal_prompts_that_arrive_together_end_up_on_the_same_pages():
    served = Served(config(max_prefill_tokens=64, min_prefill_queries=16), MODEL)
    prompt = PROMPT[:13]
    for number in range(2):
        served.engine.submit(request(number, prompt, SamplingParams(20, seed=number)))
    served.turn()
    assert [len(step.rows) for plan in served.runner.plans for step in plan.steps] == [2]
    assert served.engine.stats().num_pages_used == 8  # both have computed all of it
    for _ in range(4):
        served.turn()
    first, second = (seq for seq in served.scheduler._slots if seq is not None)
    assert first.pages[:3] == second.pages[:3]
    assert served.engine.stats().num_pages_used == 3 + 2 * 2
    served.run()
    for number in range(2):
        ids = [i for event in served.events[str(number)] for i in event.token_ids]
        assert ids == MODEL.alone(prompt, SamplingParams(20, seed=number))


def test_a_prompt_that_is_being_computed_is_found_by_those_behind_it():
    served = Served(config(), MODEL)
    for number in range(4):
        served.engine.submit(request(number, PROMPT, SamplingParams(2)))
    served.run()
    cached = [served.events[str(number)][-1].num_cached_tokens for number in range(4)]
    assert cached == [0, 32, 36, 36]  # the second one's last chunk shared a step with the first one's


def test_the_prefix_that_was_used_last_stays_longest_and_is_lost_from_its_end():
    # 12 usable pages; a request of 17 + 3 tokens leaves four full pages of its prompt in the cache.
    served = Served(config(max_model_len=40, num_pages=13), MODEL)
    one, two = PROMPT[:17], tuple(range(60, 77))
    run(served, 0, one)
    run(served, 1, two)
    assert run(served, 2, one) == 16
    run(served, 3, tuple(range(80, 110)), max_tokens=1)  # takes eight pages: four free, then those of `two`
    assert run(served, 4, one) == 16
    assert run(served, 5, two) == 0
    # Ten pages of another leave the beginning of `one`, not its end.
    served = Served(config(max_model_len=40, num_pages=13), MODEL)
    run(served, 0, one)
    run(served, 1, tuple(range(80, 118)), max_tokens=1)
    assert 0 < run(served, 2, one) < 16


@pytest.mark.parametrize("key", [0, 1])
def test_prompts_whose_hashes_collide_are_told_apart(monkeypatch, key):
    """The worst hash there is: everything, or everything with the same last token, has the same key."""
    monkeypatch.setattr(prefix, "page_key", lambda before, tokens: key and tokens[-1])
    served = Served(config(), MODEL)
    prompts = [PROMPT, (7, *PROMPT[1:]), (*PROMPT[:4], 7, *PROMPT[5:]), PROMPT[4:], PROMPT]
    cached = [run(served, number, prompt) for number, prompt in enumerate(prompts)]
    assert cached[:2] == [0, 0]
    assert cached[4] == 36 if key else 4


@given(st.lists(st.tuples(st.integers(0, 1), st.lists(st.integers(0, 1), max_size=5)), max_size=12))
def test_a_chain_is_known_as_far_as_one_like_it_was_inserted(prompts):
    """Against a set of everything inserted; keys collide all the time."""
    real = prefix.page_key
    prefix.page_key = lambda before, tokens: real(before, tokens) % 5
    try:
        cache, known, page = PrefixCache(), set(), 0
        for salt, tokens in prompts:
            pages = [(token,) for token in tokens]
            prompt = [(salt, tuple(tokens[: n + 1])) for n in range(len(tokens))]
            expected = next((n for n, whole in enumerate(prompt) if whole not in known), len(prompt))
            chain = Chain(str(salt))
            found = cache.matches(chain, pages)
            assert len(found) == expected
            for entry in found:
                chain.append(entry)
            for ids, whole in list(zip(pages, prompt))[expected:]:
                page += 1
                entry = cache.insert(chain, ids, page)
                if entry is None:
                    assert not chain.is_open
                    break
                assert entry.page == page
                known.add(whole)
            cache.check()
    finally:
        prefix.page_key = real
