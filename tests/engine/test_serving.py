"""Whole runs of the engine on a fake device, turn by turn, compared with each request alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.engine.plan import Step
from jaxserve.types import Event, Request, SamplingParams
from tests.engine.oracle import answer
from tests.fakes import EOS, FakeModel, FakeRunner, FakeTokenizer

TOKENIZER = FakeTokenizer()
MODEL = FakeModel(ids=tuple(3 + byte for byte in "abé".encode()), eos_every=12)
MOST_TURNS = 5000


@dataclass
class Served:
    """An engine without a thread, and all that came out of it."""

    config: EngineConfig
    model: FakeModel = MODEL
    expected_output: float | None = None  # what admission takes for the length of answers, at first
    events: dict[str, list[Event]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.runner = FakeRunner(self.config, self.model)
        self.engine = Engine(
            self.config, self.runner, TOKENIZER, deliver=self._deliver, vocab_size=TOKENIZER.vocab_size
        )
        self.engine.start(in_thread=False)
        self.scheduler = self.engine._scheduler
        self.runner.watch(self.scheduler)
        if self.expected_output is not None:
            self.scheduler._admission.mean_output = self.expected_output

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            self.events.setdefault(event.request_id, []).append(event)

    def turn(self) -> bool:
        worked = self.engine.turn()
        self.scheduler.check()
        self.runner.check_cache()
        stats = self.engine.stats()
        assert stats.state == "ready", stats.reason
        assert stats.num_pages_used + self.scheduler._kv.pool.num_free == stats.num_pages_total
        return worked

    def run(self) -> None:
        for _ in range(MOST_TURNS):
            if not self.turn():
                break
        else:
            raise AssertionError("the engine does not come to rest")
        assert self.runner.num_in_flight == 0
        stats = self.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.num_pages_used) == (0, 0, 0)


def request(
    number: int, prompt_ids: tuple[int, ...], params: SamplingParams, salt: str | None = None
) -> Request:
    return Request(str(number), prompt_ids, params, arrival_s=0.0, cache_salt=salt)


@dataclass(frozen=True)
class Arrival:
    turn: int
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    abort_after: int | None
    salt: str | None


@st.composite
def workloads(draw: st.DrawFn) -> tuple[EngineConfig, list[Arrival]]:
    page_size = draw(st.integers(1, 9))
    max_model_len = draw(st.integers(2, 60))
    pages_per_seq = -(-max_model_len // page_size)
    config = EngineConfig(
        max_model_len=max_model_len,
        page_size=page_size,
        num_pages=1 + pages_per_seq + draw(st.integers(0, 2 * pages_per_seq)),
        max_num_seqs=draw(st.integers(1, 6)),
        max_prefill_tokens=draw(st.integers(1, 40)),
        min_prefill_queries=draw(st.integers(1, 16)),
        prefill_step_cost=draw(st.sampled_from([0, 16, 100])),
        admission=draw(st.sampled_from(["optimistic", "optimistic", "reserve"])),
        enable_prefix_caching=draw(st.sampled_from([True, True, True, False])),
        prefix_alignment=draw(st.sampled_from([None, None, page_size, 2 * page_size, 5 * page_size])),
        **draw(st.sampled_from([{}, {}, {"deterministic": True}, *({"decode_steps": n} for n in (2, 3, 9))])),
    )
    arrivals = []
    for _ in range(draw(st.integers(1, 12))):
        num_prompt = draw(st.integers(1, max_model_len - 1))
        params = SamplingParams(
            max_tokens=draw(st.integers(1, max_model_len - num_prompt)),
            seed=draw(st.integers(0, 3)),
            stop=draw(st.sampled_from([(), (), ("ab",), ("é", "bba")])),
            stop_token_ids=draw(st.sampled_from([frozenset(), frozenset(), frozenset({3 + ord("b")})])),
            ignore_eos=draw(st.booleans()),
        )
        # Few different prompts: sequences that share their beginning must not get mixed up.
        prompt_ids = tuple(5 + i % draw(st.integers(1, 3)) for i in range(num_prompt))
        turn, abort_after = draw(st.integers(0, 20)), draw(st.none() | st.none() | st.integers(0, 15))
        salt = draw(st.sampled_from([None, None, "tenant"]))
        arrivals.append(Arrival(turn, prompt_ids, params, abort_after, salt))
    return config, arrivals


@settings(max_examples=300)
@given(workloads(), st.sampled_from([0.0, 0.0, 20.0]))
def test_every_request_is_answered_as_if_it_were_alone_and_no_page_is_lost(workload, expected_output):
    config, arrivals = workload
    served = Served(config, expected_output=expected_output)
    for turn in range(40):
        for number, arrival in enumerate(arrivals):
            if arrival.turn == turn:
                served.engine.submit(request(number, arrival.prompt_ids, arrival.params, arrival.salt))
            if arrival.abort_after is not None and arrival.turn + arrival.abort_after == turn:
                served.engine.abort(str(number))
        served.turn()
    served.run()

    for number, arrival in enumerate(arrivals):
        events = served.events[str(number)]
        ids = tuple(token_id for event in events for token_id in event.token_ids)
        text = "".join(event.text for event in events)
        last = events[-1]
        assert [event.finish_reason for event in events[:-1]] == [None] * (len(events) - 1)
        assert last.timeline is not None
        assert last.num_cached_tokens < len(arrival.prompt_ids)
        assert last.num_cached_tokens % config.hit_alignment == 0
        assert (last.num_prompt_tokens, last.num_output_tokens) == (len(arrival.prompt_ids), len(ids))
        whole = answer(MODEL.alone(arrival.prompt_ids, arrival.params), arrival.params, TOKENIZER)
        if last.finish_reason == "abort":
            assert arrival.abort_after is not None
            assert ids == whole.token_ids[: len(ids)]
            assert len(ids) < len(whole.token_ids)
        else:
            assert (ids, text, last.finish_reason, last.stop_reason) == whole
    assert served.runner.most_in_flight <= 2
    if config.admission == "reserve":
        assert served.scheduler.num_preemptions == 0


@settings(max_examples=100)
@given(workloads())
def test_between_two_tokens_of_a_stream_the_device_works_on_no_more_than_the_budget(workload):
    config, arrivals = workload
    served = Served(replace(config, admission="reserve"))
    for turn in range(21):
        for number, arrival in enumerate(arrivals):
            if arrival.turn == turn:
                served.engine.submit(request(number, arrival.prompt_ids, arrival.params))
        served.turn()
    served.run()
    steps = [step for plan in served.runner.plans for step in plan.steps]
    since: dict[int, list[Step]] = {}  # by slot, the steps after the last token of whoever has it
    for step in steps:
        for slot in since:
            since[slot].append(step)
        for row in step.rows:
            if row.params is not None:
                since.pop(row.slot, None)
            elif row.slot in since:
                assert [other.kind for other in since[row.slot]].count("prefill") <= 1
                work = sum(other.batch * other.queries for other in since[row.slot])
                assert work <= config.turn_budget
            if row.sample:
                since[row.slot] = []


@settings(max_examples=100)
@given(workloads())
def test_requests_get_their_slots_in_the_order_in_which_they_came(workload):
    config, arrivals = workload
    served = Served(config)
    order = sorted(range(len(arrivals)), key=lambda number: arrivals[number].turn)
    admitted: list[Request] = []
    scheduler = served.engine._scheduler
    for turn in range(21):
        for number in order:
            if arrivals[number].turn == turn:
                served.engine.submit(request(number, arrivals[number].prompt_ids, arrivals[number].params))
        served.turn()
        admitted += [seq.request for seq in scheduler._slots if seq and seq.request not in admitted]
        waiting = [int(seq.request.request_id) for seq in scheduler._waiting]
        arrived = [number for number in order if arrivals[number].turn <= turn]
        assert waiting == arrived[len(arrived) - len(waiting) :]
    served.run()
    assert len(served.events) == len(arrivals)


def config(**changes: int) -> EngineConfig:
    limits = {
        "max_model_len": 200,
        "page_size": 4,
        "num_pages": 200,
        "max_num_seqs": 4,
        "max_prefill_tokens": 16,
        "min_prefill_queries": 4,
    }
    return EngineConfig(**{**limits, **changes})


def kinds(served: Served) -> str:
    return "".join(step.kind[0] for plan in served.runner.plans for step in plan.steps)


def test_a_step_is_launched_before_the_ids_of_the_one_before_are_read():
    served = Served(config(), FakeModel())
    served.engine.submit(request(0, (5,), SamplingParams(max_tokens=10)))
    in_flight_at_launch = []
    launch = served.runner.launch
    served.runner.launch = lambda plan: (
        in_flight_at_launch.append(served.runner.num_in_flight),
        launch(plan),
    )[1]
    served.run()
    assert in_flight_at_launch == [0] + [1] * 9


def test_a_prompt_decodes_right_after_its_last_chunk_though_its_first_id_was_not_read():
    served = Served(config(), FakeModel())
    served.engine.submit(request(0, (5,) * 40, SamplingParams(max_tokens=3)))
    for _ in range(4):
        served.turn()
    assert kinds(served) == "pppd"
    assert len(served.events["0"]) == 1


def test_a_long_prompt_takes_turns_with_the_streams_that_run():
    served = Served(config(), FakeModel())
    served.engine.submit(request(0, (5,), SamplingParams(max_tokens=30)))
    for _ in range(3):
        served.turn()
    served.engine.submit(request(1, (6,) * 64, SamplingParams(max_tokens=2)))
    served.run()
    assert kinds(served).startswith("pddpdpdpdpd")


def test_short_prompts_that_wait_together_share_a_step():
    served = Served(config(), FakeModel())
    for number in range(4):
        served.engine.submit(request(number, (5,) * (number + 1), SamplingParams(max_tokens=2)))
    served.run()
    assert kinds(served) == "pd"


def test_the_step_behind_the_last_one_has_no_row_of_a_request_that_ended_by_length():
    served = Served(config(), FakeModel())
    served.engine.submit(request(0, (5,), SamplingParams(max_tokens=4)))
    served.run()
    rows = Counter(step.kind for plan in served.runner.plans for step in plan.steps for row in step.rows)
    assert rows == {"prefill": 1, "decode": 3}


def test_a_request_may_fill_the_context_to_its_last_token():
    served = Served(config(max_model_len=32, num_pages=9), FakeModel())
    served.engine.submit(request(0, (5,) * 20, SamplingParams(max_tokens=12)))
    served.run()
    assert served.events["0"][-1].num_output_tokens == 12


def test_pages_of_a_request_that_ended_are_used_again_while_its_stale_row_is_in_flight():
    # One slot and a pool for one sequence: whoever comes next can't avoid the pages of the one before.
    tight = config(max_num_seqs=1, max_model_len=32, num_pages=9)
    model = FakeModel(eos_every=6)
    served = Served(tight, model)
    params = [SamplingParams(max_tokens=20, seed=seed) for seed in range(30)]
    for number in range(30):
        served.engine.submit(request(number, (5,) * 12, params[number]))
    served.run()
    stale = 0
    for number in range(30):
        expected = answer(model.alone((5,) * 12, params[number]), params[number], TOKENIZER)
        stale += expected.token_ids[-1] == EOS and len(expected.token_ids) < 20
        assert tuple(i for e in served.events[str(number)] for i in e.token_ids) == expected.token_ids
    assert stale > 10


def test_a_big_request_at_the_head_of_the_line_is_not_overtaken():
    served = Served(config(max_model_len=32, num_pages=11), FakeModel())
    served.engine.submit(request(0, (5,) * 8, SamplingParams(max_tokens=8)))
    served.engine.submit(request(1, (5,) * 20, SamplingParams(max_tokens=12)))
    served.engine.submit(request(2, (5,), SamplingParams(max_tokens=1)))
    served.turn()
    assert served.engine.stats().num_running == 1
    served.run()
    admitted = [served.events[str(number)][-1].timeline.admitted_s for number in range(3)]
    assert admitted == sorted(admitted)


def test_an_abort_gives_slot_and_pages_back_at_the_next_turn_running_or_queued():
    served = Served(config(max_num_seqs=1), FakeModel())
    for number in range(3):
        served.engine.submit(request(number, (5 + number,) * 50, SamplingParams(max_tokens=100)))
    for _ in range(6):
        served.turn()
    served.engine.abort("0")
    served.engine.abort("1")
    served.turn()
    assert [served.events[number][-1].finish_reason for number in "01"] == ["abort", "abort"]
    assert served.events["1"][-1].timeline.admitted_s is None
    stats = served.engine.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 0)
    assert stats.num_pages_used == 4  # the first chunk of the third
    served.run()
    assert served.events["2"][-1].finish_reason == "length"


def test_what_the_device_samples_for_an_aborted_request_is_dropped():
    served = Served(config(), FakeModel())
    served.engine.submit(request(0, (5,), SamplingParams(max_tokens=50)))
    for _ in range(5):
        served.turn()
    served.engine.abort("0")
    served.run()
    assert [event.finish_reason for event in served.events["0"]] == [None] * 4 + ["abort"]


def test_the_same_id_can_be_used_again_once_its_request_has_ended():
    served = Served(config(), FakeModel())
    for _ in range(2):
        served.engine.submit(request(0, (5,), SamplingParams(max_tokens=2)))
        served.run()
    assert [event.finish_reason for event in served.events["0"]] == [None, "length"] * 2
