"""The deterministic mode on real steps: one request, one answer, to the last bit of its logits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.errors import ConfigError
from jaxserve.ops.backend import Backend
from jaxserve.runtime import determinism
from jaxserve.runtime.determinism import RowCheck, require_deterministic_device
from jaxserve.types import Event, Request, SamplingParams
from tests.fakes import FakeTokenizer
from tests.models.tiny import VOCAB
from tests.runtime.bits import Recorder, Told
from tests.runtime.conftest import Tiny
from tests.runtime.serving import Job

# Gemma's window of 5 lies across pages and chunks; the pool holds one long sequence and a bit.
CONFIG = EngineConfig(
    max_model_len=64, num_pages=18, page_size=4, max_num_seqs=4, max_prefill_tokens=16,
    min_prefill_queries=16, max_logprobs=3, deterministic=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def recorder(gemma3: Tiny, backend: Backend) -> Recorder:
    return Recorder(gemma3.runner(CONFIG, backend))


def random_jobs(rng: np.random.Generator, num: int) -> list[Job]:
    """Greedy and drawn, filtered and penalised, scored and not; two in three begin alike."""
    stem = rng.integers(VOCAB, size=40).tolist()
    jobs = []
    for seed in range(num):
        own = rng.integers(VOCAB, size=int(rng.integers(1, 10))).tolist()
        prompt = (*stem[: int(rng.choice([0, 17, 33, 40]))], *own)
        params = SamplingParams(
            int(rng.integers(6, min(24, 65 - len(prompt)))),
            temperature=float(rng.choice([0.0, 0.8, 1.5])),
            top_k=int(rng.choice([0, 5])),
            top_p=float(rng.choice([1.0, 0.8])),
            seed=seed,
            frequency_penalty=float(rng.choice([0.0, 0.0, 0.5])),
            logprobs=(None, 2)[int(rng.integers(2))],
            prompt_logprobs=(None, None, None, 1)[int(rng.integers(4))],
        )
        jobs.append(Job(prompt, params, turn=int(rng.integers(0, 16))))
    return jobs


def alone(recorder: Recorder, job: Job) -> Told:
    (told,), stats = recorder.answer(CONFIG, [replace(job, turn=0)])
    assert (stats.num_preemptions, told.num_cached) == (0, 0)
    assert len(told.logits) == job.params.max_tokens
    return told


@pytest.mark.parametrize("seed", range(2))
def test_bits_are_those_of_the_request_alone_in_any_batch_after_preemptions_and_after_hits(recorder, seed):
    jobs = random_jobs(np.random.default_rng(seed), 10)
    expected = [alone(recorder, job) for job in jobs]
    assert all(len(found) == 1 for told in expected for found in told.logits.values())
    together, stats = recorder.answer(CONFIG, jobs)
    assert stats.num_preemptions > 0
    assert sum(told.num_cached for told in together) > 0
    # A replay adds nothing to the hashes of a position: what it computes has the same bits.
    assert [replace(told, num_cached=0) for told in together] == expected
    late = [replace(job, turn=16 - job.turn) for job in jobs]
    again, _ = recorder.answer(replace(CONFIG, admission="reserve"), late)
    assert [replace(told, num_cached=0) for told in again] == expected


def test_a_hit_of_a_whole_chunk_has_the_bits_of_a_miss(recorder):
    rng = np.random.default_rng(3)
    prompt = tuple(rng.integers(VOCAB, size=41).tolist())
    job = Job(prompt, SamplingParams(6, temperature=0.0, logprobs=3))
    follower = replace(job, params=replace(job.params, seed=1), turn=20)
    (first, second), _ = recorder.answer(CONFIG, [job, follower])
    assert (first.num_cached, second.num_cached) == (0, 32)
    assert replace(second, num_cached=0) == first


def embeddings(recorder: Recorder, config: EngineConfig, prompts: list[tuple[int, ...]]) -> list[bytes]:
    """The vectors of prompts that are embedded together, one being preempted now and then."""
    events: list[Event] = []
    engine = Engine(config, recorder, FakeTokenizer(), deliver=events.extend, eos_ids=frozenset())
    engine.start(in_thread=False)
    for n, prompt in enumerate(prompts):
        engine.submit(Request(str(n), prompt, SamplingParams(0, temperature=0.0), arrival_s=0.0, embeds=True))
    turn = 0
    while engine.turn():
        turn += 1
        running = list(engine._scheduler._running())
        if turn % 2 == 0 and len(running) > 1:
            engine._scheduler.preempt(running[0])
    assert (engine.stats().num_preemptions > 0) == (len(prompts) > 1)
    found = {int(event.request_id): event.embedding for event in events}
    return [found[n].tobytes() for n in range(len(prompts))]


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_a_vector_has_the_same_bits_in_any_company_and_after_preemptions(recorder, pooling):
    config = replace(CONFIG, pooling=pooling)
    prompts = [job.prompt_ids for job in random_jobs(np.random.default_rng(7), 6)]
    alone = [embeddings(recorder, config, [prompt])[0] for prompt in prompts]
    assert embeddings(recorder, config, prompts) == alone


def steps(config: EngineConfig, crooked: str) -> dict[tuple[str, int, int], object]:
    """Stand-ins for compiled steps: all rows are equal, but for the last one of the program `crooked`."""
    batch, queries = config.decode_buckets[-1], config.max_chunk

    def rows_of(kind: str, num_rows: int) -> np.ndarray:
        rows = np.ones((num_rows, 5), np.float32)
        if kind == crooked:
            rows[-1] = np.nextafter(rows[-1], np.float32(2))
        return rows

    def forward(kind: str, num_rows: int) -> object:
        return lambda leaves, kv, state, packed: (kv, state, rows_of(kind, num_rows), None, None)

    return {
        ("prefill", 1, queries): forward("prefill", 1),
        ("decode", batch, 1): forward("decode", batch),
        ("random", batch, 1): lambda state, logits, rows: (state, rows_of("random", batch)[:, 0]),
        ("logprobs", batch, 1): lambda logits, ids: rows_of("logprobs", batch),
        ("score", 1, 1): lambda leaves, hidden, wanted: rows_of("score", wanted.shape[1]),
    }


def test_a_device_whose_rows_depend_on_their_place_is_refused(gemma3):
    places = {
        "decode": "another place of a decode step", "random": "another row of a sampler",
        "logprobs": "another row of log-probabilities", "score": "another row of prompt log-probabilities",
    }  # fmt: skip
    RowCheck(steps(CONFIG, "none"), [], None, None, gemma3.model, CONFIG).run()
    for crooked, where in places.items():
        with pytest.raises(ConfigError, match=f"deterministic: cpu .* in {where};.*--max-num-seqs 1"):
            RowCheck(steps(CONFIG, crooked), [], None, None, gemma3.model, CONFIG).run()


def test_a_gpu_is_refused_unless_xla_is_told_to_be_deterministic(monkeypatch):
    monkeypatch.setattr(determinism.jax, "default_backend", lambda: "gpu")
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x")
    with pytest.raises(ConfigError, match="XLA_FLAGS=--xla_gpu_deterministic_ops=true"):
        require_deterministic_device()
    monkeypatch.setenv("XLA_FLAGS", "--xla_dump_to=x --xla_gpu_deterministic_ops=true")
    require_deterministic_device()
