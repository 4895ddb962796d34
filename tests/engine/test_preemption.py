"""When pages run out: who is admitted, who is preempted, and that nobody can tell from the answer."""

from __future__ import annotations

import pytest

from jaxserve.types import SamplingParams
from tests.engine.test_serving import Served, config, request
from tests.fakes import FakeModel

MODEL = FakeModel()


def pressed(**changes) -> Served:
    """Admission that takes every answer for empty, and a pool for one long sequence and a bit."""
    limits = {"max_model_len": 64, "num_pages": 20, "max_num_seqs": 4, **changes}
    return Served(config(**limits), MODEL, expected_output=0.0)


def submit(served: Served, number: int, num_prompt: int = 8, max_tokens: int = 40, **params) -> None:
    served.engine.submit(request(number, (5 + number,) * num_prompt, SamplingParams(max_tokens, **params)))


def ids(served: Served, number: int) -> list[int]:
    return [i for event in served.events[str(number)] for i in event.token_ids]


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("num_requests", [2, 3, 8])
def test_a_preempted_request_goes_on_with_identical_output(caching, num_requests):
    served = pressed(enable_prefix_caching=caching)
    for number in range(num_requests):
        submit(served, number, seed=number, temperature=0.7)
    served.run()
    assert served.scheduler.num_preemptions > 0
    assert served.engine.stats().num_preemptions == served.scheduler.num_preemptions
    for number in range(num_requests):
        assert ids(served, number) == MODEL.alone((5 + number,) * 8, SamplingParams(40, 0.7, seed=number))
        assert served.events[str(number)][-1].finish_reason == "length"


def test_text_and_stop_strings_go_on_over_a_preemption():
    for stop in ("q", "zz", "ab", "xyz"):
        served = pressed()
        params = SamplingParams(40, stop=(stop,))
        for number in range(4):
            served.engine.submit(request(number, (5 + number,) * 8, params))
        served.run()
        assert served.scheduler.num_preemptions > 0
        for number in range(4):
            whole = "".join(chr(i - 3) for i in MODEL.alone((5 + number,) * 8, params))
            text = "".join(event.text for event in served.events[str(number)])
            assert text == whole.partition(stop)[0]


def test_the_first_in_line_is_never_preempted_and_ends_first():
    served = pressed()
    for number in range(4):
        submit(served, number)
    spared = []
    preempt = served.scheduler.preempt

    def watched(seq):
        spared.append(min(other.rank for other in served.scheduler._running()) < seq.rank)
        preempt(seq)

    served.scheduler.preempt = watched
    served.run()
    assert len(spared) > 3
    assert all(spared)
    ends = [served.events[str(number)][-1].timeline.finished_s for number in range(4)]
    assert ends == sorted(ends)


def test_the_one_that_loses_least_is_preempted():
    served = pressed(num_pages=17)
    submit(served, 0, num_prompt=8)
    submit(served, 1, num_prompt=20, max_tokens=30)
    submit(served, 2, num_prompt=12)
    while not served.scheduler.num_preemptions:
        served.turn()
    assert [seq.request.request_id for seq in served.scheduler._waiting] == ["2"]


def test_what_was_preempted_stands_in_front_of_later_requests():
    served = pressed(max_num_seqs=2)
    for number in range(4):
        submit(served, number)
    while not served.scheduler.num_preemptions:
        served.turn()
    assert [seq.request.request_id for seq in served.scheduler._waiting] == ["1", "2", "3"]
    assert (served.engine.stats().num_running, served.engine.stats().num_waiting) == (1, 3)


def test_what_was_preempted_finds_its_own_pages_in_the_cache():
    served = pressed(max_num_seqs=2)
    submit(served, 0, num_prompt=4, max_tokens=44)
    submit(served, 1, num_prompt=30, max_tokens=20)
    served.run()
    assert served.scheduler.num_preemptions > 0
    rows = [row for plan in served.runner.plans for step in plan.steps for row in step.rows if row.params]
    assert [row.start > 0 for row in rows] == [False, False] + [True] * (len(rows) - 2)
    assert served.events["1"][-1].num_cached_tokens == 0  # its client had to wait for all of its prompt


def test_reserving_never_preempts_and_lets_fewer_run():
    served = pressed(admission="reserve")
    for number in range(4):
        submit(served, number)
    served.turn()
    stats = served.engine.stats()
    assert (stats.num_running, stats.wait_reason) == (1, "pages")
    served.run()
    assert served.scheduler.num_preemptions == 0


def test_an_optimist_learns_from_the_answers_it_has_seen():
    served = Served(config(max_model_len=64, num_pages=33, max_num_seqs=8), MODEL)
    for number in range(8):
        submit(served, number, max_tokens=56)
    served.turn()
    assert served.engine.stats().num_running == 2  # at first it takes answers for long
    served.run()
    for number in range(8, 200):
        submit(served, number, num_prompt=8, max_tokens=2)
    served.run()
    num_preemptions = served.scheduler.num_preemptions
    for number in range(200, 208):
        submit(served, number, max_tokens=56)
    served.turn()
    assert served.engine.stats().num_running > 4
    served.run()
    assert served.scheduler.num_preemptions > num_preemptions


def test_shared_pages_cost_a_newcomer_nothing():
    prompt = tuple(range(10, 50))
    served = Served(config(max_model_len=64, num_pages=30, max_num_seqs=8), MODEL, expected_output=0.0)
    served.engine.submit(request(0, prompt, SamplingParams(2)))
    served.run()
    for number in range(1, 6):
        served.engine.submit(request(number, prompt, SamplingParams(4)))
    served.turn()
    assert served.engine.stats().num_running == 5
    served.run()


def test_an_abort_of_what_was_preempted_ends_it_at_the_next_turn():
    served = pressed(max_num_seqs=2)
    submit(served, 0)
    submit(served, 1)
    while not served.scheduler.num_preemptions:
        served.turn()
    served.engine.abort("1")
    served.turn()
    assert served.events["1"][-1].finish_reason == "abort"
    assert served.engine.stats().num_waiting == 0
    served.run()
    assert ids(served, 0) == MODEL.alone((5,) * 8, SamplingParams(40))
    assert ids(served, 1) == MODEL.alone((6,) * 8, SamplingParams(40))[: len(ids(served, 1))]


def test_an_end_that_comes_to_light_right_after_the_preemption_is_the_end():
    """The id still under way when the pages were taken may be a stop token."""
    plain = pressed(max_num_seqs=2)
    submit(plain, 0)
    submit(plain, 1)
    while not plain.scheduler.num_preemptions:
        plain.turn()
    victim = plain.scheduler._waiting.head
    last = len(victim.output_ids)  # of its ids the one that was under way
    whole = MODEL.alone((6,) * 8, SamplingParams(40))
    assert whole.index(whole[last - 1]) == last - 1
    served = pressed(max_num_seqs=2)
    submit(served, 0)
    submit(served, 1, stop_token_ids=frozenset({whole[last - 1]}))
    served.run()
    assert ids(served, 1) == whole[:last]
    assert served.events["1"][-1].finish_reason == "stop"
    assert served.scheduler.num_preemptions == 1
