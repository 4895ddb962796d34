"""Compiled steps: nothing is compiled after start-up, no step copies the pool, weights are checked."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.plan import Plan, Row, Step
from jaxserve.errors import WeightsError
from jaxserve.models.decoder import abstract_decoder
from jaxserve.ops.backend import Backend
from jaxserve.runtime.compilations import CompilationCounter
from jaxserve.runtime.executables import Executables
from jaxserve.runtime.runner import ModelRunner, compile_steps, order_params, shapes
from jaxserve.runtime.state import ENDED, kv_shapes, state_shapes
from jaxserve.types import SamplingParams
from tests.models.tiny import VOCAB
from tests.runtime.conftest import Tiny
from tests.runtime.serving import Job, serve

CONFIG = EngineConfig(
    max_model_len=96, num_pages=40, page_size=8, max_num_seqs=4, max_prefill_tokens=64,
    decode_buckets=(2, 4), prefill_buckets=((4, 8), (2, 32)),
)  # fmt: skip


@pytest.fixture(scope="module")
def runner(llama: Tiny, backend: Backend) -> ModelRunner:
    return llama.runner(CONFIG, backend)


def random_jobs(seed: int, num: int = 14) -> list[Job]:
    rng = np.random.default_rng(seed)
    jobs = []
    for n in range(num):
        length = int(rng.integers(1, 80))
        params = SamplingParams(
            int(rng.integers(1, 97 - length)),
            temperature=float(rng.choice([0.0, 0.7, 1.5])),
            top_k=int(rng.choice([0, 3])),
            top_p=float(rng.choice([1.0, 0.8])),
            seed=int(rng.integers(2**63)),
        )
        jobs.append(Job(tuple(rng.integers(VOCAB, size=length).tolist()), params, turn=20 * (n // 4)))
    return jobs


def count_compilations(runner: ModelRunner, jobs: list[Job]) -> int:
    counter = CompilationCounter()
    try:
        serve(CONFIG, runner, jobs)
        return counter.count
    finally:
        counter.close()


def test_serving_any_mix_of_lengths_and_batches_compiles_nothing(runner):
    seen: set[tuple[str, int, int]] = set()
    launch = runner.launch

    def watched(plan: Plan) -> object:
        seen.update((step.kind, step.batch, step.queries) for step in plan.steps)
        return launch(plan)

    runner.launch = watched
    try:
        with jax.no_tracing():
            assert count_compilations(runner, random_jobs(0)) == 0
    finally:
        del runner.launch
    assert seen == {key for key in shapes(CONFIG) if key[0] in ("prefill", "decode")}, "a shape went unused"


def test_a_shape_that_was_not_prepared_would_be_noticed(runner):
    launch = runner.launch

    def sloppy(plan: Plan) -> object:
        jax.jit(lambda ids: ids + 1)(np.zeros(len(plan.steps[0].rows)))
        return launch(plan)

    runner.launch = sloppy
    try:
        assert count_compilations(runner, [Job((1, 2, 3), SamplingParams(4))]) > 0
    finally:
        del runner.launch


def test_a_step_of_another_shape_is_an_error(runner):
    row = Row(0, 0, 3, (1, 2, 3), 0, (1,), True, SamplingParams(1))
    with pytest.raises(KeyError):
        runner.launch(Plan((Step("prefill", 4, 7, (row,)),)))


def pointers(runner: ModelRunner) -> list[int]:
    return [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves((runner._kv, runner._state))]


def test_pool_and_state_stay_where_they_are(runner):
    before = pointers(runner)
    moved = []
    launch = runner.launch

    def watched(plan: Plan) -> object:
        handle = launch(plan)
        moved.append(pointers(runner) != before)
        return handle

    runner.launch = watched
    try:
        serve(CONFIG, runner, random_jobs(2))
    finally:
        del runner.launch
    assert len(moved) > 100
    assert not any(moved)


def test_no_program_takes_memory_for_a_second_pool(llama, backend):
    """Compiled for a pool that dwarfs everything else; nothing of it is allocated."""
    config = EngineConfig(
        max_model_len=64, num_pages=100_000, max_num_seqs=4, max_prefill_tokens=64,
        decode_buckets=(4,), prefill_buckets=((4, 16),), decode_steps=3,
    )  # fmt: skip
    decoder = abstract_decoder(llama.model, "float32")
    kv, state = kv_shapes(llama.model, config, "float32", backend.pool_lanes), state_shapes(config)
    leaves = order_params(decoder, llama.params)
    programs = compile_steps(decoder, leaves, kv, state, config, backend, Executables(None, ""))
    nbytes = lambda tree: sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
    assert nbytes(kv) > 10**9
    for key, program in programs.items():
        memory = program.memory_analysis()
        has_pool = key[0] in ("prefill", "decode", "loop_greedy", "loop_random")
        kept = (kv, state) if has_pool else {"greedy": state, "random": state}.get(key[0])
        assert memory.alias_size_in_bytes >= nbytes(kept), f"{key} makes new arrays of what it was given"
        assert memory.temp_size_in_bytes < nbytes(kv) // 100, f"{key} needs {memory.temp_size_in_bytes} bytes"
        assert memory.output_size_in_bytes - memory.alias_size_in_bytes < nbytes(kv) // 100


def test_ids_come_back_while_later_steps_run(runner):
    """Two launches before the first fetch, as the engine does."""
    params = SamplingParams(8, temperature=0.0)
    prefill = Step("prefill", 4, 8, (Row(0, 0, 4, (5, 6, 7, 8), 0, (1,), True, params),))
    decode = [Step("decode", 2, 1, (Row(0, n, 1, None, 1, (), True, None),)) for n in (4, 5, 6)]
    handles = [runner.launch(Plan((prefill, decode[0])))]
    handles += [runner.launch(Plan((step,))) for step in decode[1:]]
    first, *rest = [runner.fetch(handle) for handle in handles]
    ids = [result.token_ids[0] for results in (first, *rest) for result in results]
    assert ids == serve(CONFIG, runner, [Job((5, 6, 7, 8), SamplingParams(4, temperature=0.0))])[0]


def test_a_chunk_without_sample_leaves_the_slots_last_id(runner):
    params = SamplingParams(8, temperature=0.0)
    runner.launch(Plan((Step("prefill", 4, 8, (Row(1, 0, 4, (5, 6, 7, 8), 0, (2,), True, params),)),)))
    before = np.asarray(runner._state.last_id).copy()
    chunk = Row(0, 0, 8, (1,) * 8, 0, (1,), False, SamplingParams(8, seed=3))
    runner.launch(Plan((Step("prefill", 4, 8, (chunk,)),)))
    np.testing.assert_array_equal(np.asarray(runner._state.last_id)[:-1], before[:-1])


# Weights.


def test_parameters_come_in_the_order_of_the_decoders_leaves(llama):
    decoder = abstract_decoder(llama.model, "float32")
    leaves = order_params(decoder, dict(reversed(llama.params.items())))
    wanted = jax.tree.leaves(nnx.split(decoder)[1])
    assert [leaf.shape for leaf in leaves] == [leaf.shape for leaf in wanted]
    graph, state = nnx.split(decoder)
    merged = nnx.merge(graph, jax.tree.unflatten(jax.tree.structure(state), leaves))
    assert merged.layers.mlp.down.weight[...] is llama.params["layers.mlp.down.weight"]
    assert merged.final_norm.weight[...] is llama.params["final_norm.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p.pop("final_norm.weight"), r"parameters missing: final_norm\.weight \(1 in all\)"),
        (lambda p: p.update({"bias": p["final_norm.weight"]}), r"unknown to the model: bias \(1 in all\)"),
        (lambda p: p.update({"final_norm.weight": jnp.ones(5)}),
         r"final_norm\.weight: expected float32\[32\], found float32\[5\]"),
        (lambda p: p.update({"embedding.weight": p["embedding.weight"].astype(jnp.bfloat16)}),
         r"embedding\.weight: expected float32\[48, 32\], found bfloat16\[48, 32\]"),
    ],
)  # fmt: skip
def test_parameters_that_do_not_fit_are_named(llama, change, message):
    params = dict(llama.params)
    change(params)
    with pytest.raises(WeightsError, match=message):
        order_params(abstract_decoder(llama.model, "float32"), params)


# Sequences that have ended.


def test_a_row_of_a_sequence_that_has_ended_is_skipped(runner):
    prompt, params = (5, 6, 7, 8), SamplingParams(8, temperature=0.0)
    whole = serve(CONFIG, runner, [Job(prompt, params)])[0]
    num_ids = next(n for n in range(2, 6) if whole[n - 1] not in whole[: n - 1])

    def run(pages: tuple[int, int], end_ids: tuple[int, ...]) -> tuple[list[int], bool, int]:
        """Ids of a prefill and five decode steps; whether keys behind `num_ids` ids changed; the last id."""
        behind = [8 * pages[n // 8] + n % 8 for n in range(4 + num_ids - 1, 16)]
        before = np.asarray(runner._kv.keys)[:, behind]
        row = Row(2, 0, 4, prompt, 0, pages, True, params, end_ids)
        rows = [Row(2, start, 1, None, 0, (), True, None) for start in range(4, 9)]
        steps = [Step("prefill", 4, 8, (row,)), *(Step("decode", 2, 1, (one,)) for one in rows)]
        results = runner.fetch(runner.launch(Plan(tuple(steps))))
        changed = not np.array_equal(np.asarray(runner._kv.keys)[:, behind], before)
        return [result.token_ids[0] for result in results], changed, int(runner._state.last_id[2])

    assert run((37, 33), ()) == (whole[:6], True, whole[5])
    ids, changed, last_id = run((38, 34), (whole[num_ids - 1],))
    assert ids[:num_ids] == whole[:num_ids]
    assert last_id == ENDED
    assert not changed
