"""Both real models against what Hugging Face transformers answers in float32 on the same weights.

Several prompts of each model, the one of over 1,100 tokens among them, are served together by the engine:
their greedy ids come from prefill in chunks and real decode steps. Then each prompt, followed by the
reference's ids, is prefilled over the paged cache, in other chunks, for its log-probabilities; the likeliest
token after each position is also what greedy decoding would take there.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.compilation_cache import compilation_cache

from jaxserve import native
from jaxserve.engine.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import Batch, abstract_decoder
from jaxserve.ops.backend import XLA, Backend, choose
from jaxserve.runtime.runner import ModelRunner, prepare_params
from jaxserve.runtime.state import kv_shapes, zeros
from jaxserve.types import Event, Request, SamplingParams
from jaxserve.weights.model_files import open_model
from tests.fakes import FakeTokenizer

GOLDEN = Path(__file__).parent / "data" / "golden"
SERVED = (0, 4, 9, 13)  # cases that the engine serves; the last is the long one
NUM_SERVED = 17  # ids of each: more than a page
SERVED_CHUNK = 128  # prompt tokens of one step there
SHORT, CHUNK = 80, 512  # queries of a scored row: a whole short prompt with its answer, a part of a long one
HEAD_ROWS = 128  # logits are as wide as the vocabulary: only so many rows of them at a time


@dataclass(frozen=True)
class Case:
    """One prompt of a golden file."""

    prompt_ids: tuple[int, ...]
    prompt_logprobs: np.ndarray  # of prompt_ids[1:]
    next_top10: list[tuple[int, float]]
    greedy_ids: list[int]
    greedy_logprobs: np.ndarray
    gaps: np.ndarray  # between the first and the second choice of each step


@dataclass(frozen=True)
class Answer:
    """What jaxserve says of one case."""

    logprobs: np.ndarray  # of every token but the first, of prompt and reference answer together
    next_top10: np.ndarray  # log-probabilities, after the prompt, of the ids in the case's next_top10
    likeliest_ids: list[int]  # where the reference chose its greedy_ids
    served_ids: list[int] | None  # what decoding gave; None for a case that was not served


def read_cases(name: str, eos_ids: frozenset[int]) -> list[Case]:
    """SmolLM2's first answer holds an EOS, after which the reference went on in a way of its own, which no
    plain continuation of the sequence reproduces: answers are compared up to their first EOS."""
    cases = []
    for one in json.loads((GOLDEN / f"{name}.json").read_text(encoding="utf-8"))["generate"]:
        ids = one["greedy_ids"]
        end = next((i + 1 for i, token_id in enumerate(ids) if token_id in eos_ids), len(ids))
        cases.append(
            Case(
                tuple(one["prompt_ids"]), np.array(one["prompt_logprobs"]), one["next_top10"],
                ids[:end], np.array(one["greedy_logprobs"][:end]), np.array(one["greedy_top2_gap"][:end]),
            )
        )  # fmt: skip
    assert max(len(case.prompt_ids) for case in cases) > 1100
    return cases


def serve_greedily(
    model: ModelConfig,
    params: dict[str, jax.Array],
    cases: list[Case],
    backend: Backend,
    dtype: str,
    cache: Path,
) -> list[list[int]]:
    """NUM_SERVED ids for each case, all of them in the engine at the same time."""
    lens = [len(case.prompt_ids) + NUM_SERVED for case in cases]
    config = EngineConfig(
        max_model_len=max(lens),
        num_pages=1 + sum(-(-length // 16) for length in lens),
        max_num_seqs=len(cases),
        max_prefill_tokens=SERVED_CHUNK,
        decode_buckets=(len(cases),),
        prefill_buckets=((1, SERVED_CHUNK),),
    )
    runner = ModelRunner(model, dict(params), config, backend, dtype=dtype, cache=cache)
    events: list[Event] = []
    engine = Engine(config, runner, FakeTokenizer(), deliver=events.extend, eos_ids=frozenset())
    engine.start(in_thread=False)
    for n, case in enumerate(cases):
        sampling = SamplingParams(NUM_SERVED, temperature=0.0)
        engine.submit(Request(str(n), case.prompt_ids, sampling, arrival_s=0.0))
    while engine.turn():
        pass
    assert all(event.error is None for event in events)
    return [
        [token_id for event in events if event.request_id == str(n) for token_id in event.token_ids]
        for n in range(len(cases))
    ]


class Scorer:
    """Log-probabilities of given tokens, by prefill."""

    def __init__(self, model: ModelConfig, params: dict[str, jax.Array], backend: Backend, dtype: str):
        decoder = abstract_decoder(model, dtype)
        graph, abstract = nnx.split(decoder)
        structure = jax.tree.structure(abstract)
        self._leaves = prepare_params(decoder, dict(params), backend)
        config = EngineConfig(max_model_len=3 * CHUNK, num_pages=1 + 3 * CHUNK // 16)
        self._new_kv = lambda: zeros(kv_shapes(model, config, dtype, backend.pool_lanes))
        self._pages = config.num_usable_pages

        @functools.partial(jax.jit, donate_argnums=1)
        def hidden(leaves: Any, kv: Any, batch: Batch) -> Any:
            return nnx.merge(graph, jax.tree.unflatten(structure, leaves)).hidden(
                kv, batch, backend, page_size=config.page_size
            )

        @jax.jit
        def head(leaves: Any, hidden: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
            logits = nnx.merge(graph, jax.tree.unflatten(structure, leaves)).logits(hidden, backend)
            total = jax.nn.logsumexp(logits, axis=-1, keepdims=True)
            return jnp.take_along_axis(logits, ids, axis=-1) - total, jnp.argmax(logits, axis=-1)

        self._hidden, self._head = hidden, head

    def hidden_of_short(self, sequences: list[list[int]]) -> list[np.ndarray]:
        """Hidden states of whole sequences of at most SHORT tokens, in one step."""
        per_row = SHORT // 16
        tokens, lens = np.zeros((len(sequences), SHORT), np.int32), np.zeros(len(sequences), np.int32)
        for row, ids in enumerate(sequences):
            tokens[row, : len(ids)], lens[row] = ids, len(ids)
        table = 1 + np.arange(len(sequences) * per_row, dtype=np.int32).reshape(-1, per_row)
        out, _ = self._hidden(self._leaves, self._new_kv(), Batch(tokens, table, 0 * lens, lens))
        return [np.asarray(row[:n]) for row, n in zip(out, lens)]

    def hidden_of_long(self, ids: list[int]) -> np.ndarray:
        """Hidden states of one sequence, chunk by chunk."""
        kv, out = self._new_kv(), []
        table = np.random.default_rng(0).permutation(np.arange(1, self._pages + 1, dtype=np.int32))[None]
        for start in range(0, len(ids), CHUNK):
            chunk = np.array(ids[start : start + CHUNK], np.int32)
            tokens = np.pad(chunk, (0, CHUNK - len(chunk)))[None]
            rows = np.array([start], np.int32), np.array([len(chunk)], np.int32)
            hidden, kv = self._hidden(self._leaves, kv, Batch(tokens, table, *rows))
            out.append(np.asarray(hidden[0, : len(chunk)]))
        return np.concatenate(out)

    def head(self, hidden: np.ndarray, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Log-probabilities of `ids` [R, C] after `hidden` [R, H], and the likeliest ids [R] there."""
        logprobs, likeliest = [], []
        for start in range(0, len(hidden), HEAD_ROWS):
            rows, wanted = hidden[start : start + HEAD_ROWS], ids[start : start + HEAD_ROWS]
            pad = ((0, HEAD_ROWS - len(rows)), (0, 0))
            out = self._head(self._leaves, np.pad(rows, pad), np.pad(wanted, pad))
            logprobs.append(out[0][: len(rows)])
            likeliest.append(out[1][: len(rows)])
        return np.concatenate(logprobs), np.concatenate(likeliest)


def score(scorer: Scorer, cases: list[Case], served_ids: dict[int, list[int]]) -> list[Answer]:
    """The answers to all cases."""
    sequences = [[*case.prompt_ids, *case.greedy_ids] for case in cases]
    short = [n for n, ids in enumerate(sequences) if len(ids) <= SHORT]
    hidden = dict(zip(short, scorer.hidden_of_short([sequences[n] for n in short])))
    hidden |= {n: scorer.hidden_of_long(ids) for n, ids in enumerate(sequences) if n not in hidden}
    wanted = []  # a column for the next token, ten for the top 10
    for case, ids in zip(cases, sequences):
        columns = np.zeros((len(ids) - 1, 11), np.int32)
        columns[:, 0] = ids[1:]
        columns[len(case.prompt_ids) - 1, 1:] = [token_id for token_id, _ in case.next_top10]
        wanted.append(columns)
    rows = np.concatenate([hidden[n][:-1] for n in range(len(cases))])
    logprobs, likeliest = scorer.head(rows, np.concatenate(wanted))
    ends = np.cumsum([len(columns) for columns in wanted])[:-1]
    answers = []
    for n, (case, found, best) in enumerate(zip(cases, np.split(logprobs, ends), np.split(likeliest, ends))):
        at = len(case.prompt_ids) - 1
        answers.append(Answer(found[:, 0], found[at, 1:], best[at:].tolist(), served_ids.get(n)))
    return answers


def backend_named(name: str) -> Backend:
    if name == "xla":
        return XLA
    usable, reason = native.available()
    if not usable:
        pytest.skip(f"the C++ kernels can't be used: {reason}")
    return choose("native", "native")


@pytest.fixture(scope="module", autouse=True)
def cache(request: pytest.FixtureRequest) -> Iterator[Path]:
    """Programs are kept in pytest's cache folder: compiling them takes half of the time."""
    folder = request.config.cache.mkdir("compiled-steps")
    keys = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs")
    before = {key: getattr(jax.config, key) for key in keys}
    for key, value in zip(keys, (str(folder), 0.2)):
        jax.config.update(key, value)
    compilation_cache.reset_cache()
    yield folder
    for key, value in before.items():
        jax.config.update(key, value)
    compilation_cache.reset_cache()


@functools.lru_cache(maxsize=1)  # the backends share the weights
def load(path: Path, dtype: str) -> tuple[ModelConfig, dict[str, jax.Array], frozenset[int]]:
    files = open_model(path)
    try:
        key = "tokenizer.ggml.eos_token_id"
        return files.config, files.load_params(dtype), frozenset({files.source.metadata[key]})  # type: ignore[attr-defined]
    finally:
        files.close()


@functools.lru_cache(maxsize=1)  # each combination is asked for by several tests, one after the other
def answer(
    cache: Path, path: Path, name: str, dtype: str, backend_name: str
) -> tuple[list[Case], list[Answer]]:
    backend = backend_named(backend_name)
    model, params, eos_ids = load(path, dtype)
    cases = read_cases(name, eos_ids)
    # Serving by XLA is told by float32, what bfloat16 does to XLA's figures by scoring: no need for both.
    served = () if (dtype, backend_name) == ("bfloat16", "xla") else SERVED
    ids = []
    if served:
        ids = serve_greedily(model, params, [cases[n] for n in served], backend, dtype, cache)
    return cases, score(Scorer(model, params, backend, dtype), cases, dict(zip(served, ids)))


@pytest.fixture(scope="module", params=["smollm2-135m", "gemma3-270m"])
def model(request: pytest.FixtureRequest) -> tuple[Path, str]:
    return request.getfixturevalue(request.param.split("-")[0] + "_gguf"), request.param


@pytest.fixture(scope="module")
def float32(cache: Path, model: tuple[Path, str]) -> tuple[list[Case], list[Answer]]:
    return answer(cache, *model, "float32", "xla")


@pytest.fixture(scope="module", params=["xla", "native"])
def bfloat16(
    request: pytest.FixtureRequest, cache: Path, model: tuple[Path, str]
) -> tuple[list[Case], list[Answer]]:
    return answer(cache, *model, "bfloat16", request.param)


def test_greedy_ids_in_float32_are_the_references(float32):
    for case, found in zip(*float32):
        assert found.likeliest_ids == case.greedy_ids
        assert found.served_ids in (None, case.greedy_ids[:NUM_SERVED])
    assert sum(found.served_ids is not None for found in float32[1]) == len(SERVED)


def test_log_probabilities_in_float32_are_within_two_thousandths(float32):
    for case, found in zip(*float32):
        wanted = np.concatenate([case.prompt_logprobs, case.greedy_logprobs])
        np.testing.assert_allclose(found.logprobs, wanted, rtol=0, atol=2e-3)
        np.testing.assert_allclose(
            found.next_top10, [value for _, value in case.next_top10], rtol=0, atol=2e-3
        )


def test_greedy_ids_in_bfloat16_are_the_references_up_to_a_near_tie(bfloat16):
    num_compared = 0
    for case, found in zip(*bfloat16):
        near_ties = np.flatnonzero(case.gaps < 0.1)
        end = near_ties[0] if len(near_ties) else len(case.greedy_ids)
        assert found.likeliest_ids[:end] == case.greedy_ids[:end]
        if found.served_ids is not None:
            assert found.served_ids[:end] == case.greedy_ids[: min(end, NUM_SERVED)]
        num_compared += end
    assert num_compared > 100


def test_log_probabilities_in_bfloat16_are_near_the_references(bfloat16):
    errors = [
        np.abs(found.logprobs[: len(case.prompt_logprobs)] - case.prompt_logprobs)
        for case, found in zip(*bfloat16)
    ]
    assert np.concatenate(errors).mean() < 0.05
