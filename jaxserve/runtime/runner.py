"""The device side of the engine: every step compiled ahead, launched without waiting, fetched later."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.plan import History, Plan, Step, StepResult
from jaxserve.errors import WeightsError
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import DType, abstract_decoder
from jaxserve.models.rope_scaling import at_length
from jaxserve.ops.backend import Backend
from jaxserve.ops.quant import SCALE, Int8, scale_name
from jaxserve.runtime import batch as layout
from jaxserve.runtime import logprobs as scoring
from jaxserve.runtime import pooling, shaping
from jaxserve.runtime.determinism import RowCheck, require_deterministic_device
from jaxserve.runtime.executables import Executables, fingerprint, without_jax_cache
from jaxserve.runtime.state import kv_shapes, state_shapes, zeros
from jaxserve.runtime.step import Rows, make_forward, make_loop, make_sampler
from jaxserve.types import SamplingParams, TokenLogprobs

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
SAMPLERS = ("greedy", "random")
# ("prefill" | "decode", B, Q); ("greedy" | "random" | "logprobs" | "shape" | "count", B, 1); ("admit", 1, 1);
# ("score" | "pool", 1, 1); ("gather", T, 1) for T = B * Q; ("loop_greedy" | "loop_random", B, decode_steps)
Key = tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class Launched:
    """A step on its way, and the arrays that come back for it."""

    step: Step
    ids: jax.Array  # [B], or [iterations, B]
    logprobs: jax.Array | None = None  # of the ids, packed as in runtime/logprobs.py; None: no row asks
    scores: jax.Array | None = None  # of the rows' targets, the same
    params: tuple[SamplingParams, ...] = ()  # by row, if there are any of these
    pooled: jax.Array | None = None  # [R, H] of hidden states, see runtime/pooling.py; None: no row asks


Handle = list[Launched]
MaskSource = Callable[[Step], np.ndarray | None]


class ModelRunner:
    """Owns the weights, the KV pool and the slot state on the device. See engine/plan.py: Runner.

    `cache` is a folder in which compiled programs are kept for the next start.

    The constructor compiles all of `shapes(config)`; nothing is compiled afterwards, and a step of
    another shape raises. `params` are given up to it: it empties the dictionary, so that weights and
    what the backend makes of them don't fill the memory twice. Not thread-safe: the engine thread is its
    only user.
    """

    def __init__(
        self,
        model: ModelConfig,
        params: dict[str, jax.Array],
        config: EngineConfig,
        backend: Backend,
        *,
        dtype: DType,
        quantization: str | None = None,
        kv_dtype: DType | None = None,  # of the pool: `dtype`, or int8
        cache: Path | None = None,
        progress: Progress | None = None,
    ):
        model = at_length(model, config.max_model_len)
        self.model, self.config, self.backend = model, config, backend
        if config.deterministic:
            require_deterministic_device()
        decoder = abstract_decoder(model, dtype, quantization)
        self._leaves = prepare_params(decoder, params, backend)
        kv_dtype = jnp.dtype(dtype if kv_dtype is None else kv_dtype)
        name = fingerprint(
            model, config, backend.attention_name, backend.linear_name, backend.kernels,
            str(jnp.dtype(dtype)), str(kv_dtype), quantization,
        )
        executables = Executables(cache, name)
        kv, state = kv_shapes(model, config, kv_dtype, backend.pool_lanes), state_shapes(config)
        prepare = partial(
            compile_steps, decoder, self._leaves, kv, state, config, backend, executables, progress
        )
        self._steps = prepare()
        self._kv: Any = zeros(kv, backend.zeros)
        self._state: Any = zeros(state)
        # What the CPU made needs no copy, and to ask for one takes 75 us.
        self._is_host = next(iter(self._state.rows.devices())).platform == "cpu"
        self._shaping: Any = zeros(shaping.shaping_shapes(config, model.vocab_size))
        words = shaping.num_words(model.vocab_size)
        batches = {batch for kind, batch, _ in self._steps if kind == "shape"}
        self._no_mask = {n: jax.device_put(np.full((n, words), -1, np.int32)) for n in batches}
        try:
            self._try_out()
        except jax.errors.JaxRuntimeError as error:
            # A program from the disk may load and yet not run; what was donated to it is gone.
            log.warning("kept programs don't run, all are compiled again: %s", error)
            executables.clear()
            self._steps = prepare()
            self._kv, self._state = zeros(kv, backend.zeros), zeros(state)
            self._shaping = zeros(shaping.shaping_shapes(config, model.vocab_size))
            self._try_out()
        if config.deterministic:
            check = RowCheck(self._steps, self._leaves, self._kv, self._state, model, config)
            check.run()
            self._kv, self._state = check.kv, check.state
        self._params = [SamplingParams(1)] * config.max_num_seqs  # by slot: what its first row brought
        # Slots of those whose parameters ask for more than the likeliest token.
        self._random: set[int] = set()
        self._shaped: set[int] = set()
        self._telling: set[int] = set()  # log-probabilities of what they generate

    @property
    def weights_bytes(self) -> int:
        """What the weights take on the device, in the form that the backend reads."""
        return sum(leaf.nbytes for leaf in self._leaves)

    def _try_out(self) -> None:
        """Run the smallest decode step on rows that are all padding, and all that may follow it."""
        batch = self.config.decode_buckets[0]
        packed = layout.pack(Step("decode", batch, 1, ()), self.config)
        self._kv, self._state, logits, rows, _ = self._steps["decode", batch, 1](
            self._leaves, self._kv, self._state, packed
        )
        new = shaping.slot_shaping(SamplingParams(1), History((), (), ()), self.model.vocab_size)
        self._shaping = self._steps["admit", 1, 1](self._shaping, np.int32(self.config.max_num_seqs), new)
        logits = self._shape(Step("decode", batch, 1, ()), logits, rows, None)
        for kind in SAMPLERS:
            self._state, ids = self._steps[kind, batch, 1](self._state, logits, rows)
        self._shaping = self._steps["count", batch, 1](self._shaping, rows, ids)
        jax.block_until_ready(self._steps["logprobs", batch, 1](logits, ids))
        num_tokens = min(count for kind, count, _ in self._steps if kind == "gather")
        nothing = np.full((2, scoring.num_scored(self.config, self.model.vocab_size)), -1, np.int32)
        hidden = np.zeros((num_tokens, self.model.hidden_size), np.float32)
        states = self._steps["gather", num_tokens, 1](hidden, nothing)
        for kind in ("score", "pool"):
            jax.block_until_ready(self._steps[kind, 1, 1](self._leaves, states, nothing))
        if (iterations := self.config.decode_steps) > 1:
            for sampler in SAMPLERS:
                ids = self._loop(Step("decode", batch, 1, (), iterations), sampler)
            jax.block_until_ready(ids)

    def launch(self, plan: Plan, masks: MaskSource | None = None) -> Handle:
        """Start the plan's steps on the device, in order, and the copies of their ids to the host.

        `masks` is for grammars. It is called once a step, when the step's forward pass is launched and its
        sampler isn't, and so has the time of a forward pass to fetch the ids of the launch before and to find
        out what may follow them: `fetch` may be called inside. It returns int32 [B, num_words], B being
        `step.batch`, in which bit i % 32 of word i // 32 allows id i: of row n of the step in row n, all ones
        (-1) in a row without a grammar and in padding; or None when no row of the step has one.
        """
        return [self._launch(step, masks) for step in plan.steps]

    def _launch(self, step: Step, masks: MaskSource | None) -> Launched:
        if step.kind == "prefill":
            for row in step.rows:
                if row.params is not None:
                    self._admit(row.slot, row.params, row.history)
        slots: set[int] = set()  # of rows that yield a token, where it matters whose they are
        if self._random or self._shaped or self._telling:
            slots = {row.slot for row in step.rows if row.sample}
        sampler = "greedy" if slots.isdisjoint(self._random) else "random"
        if step.iterations > 1:
            return Launched(step, self._loop(step, sampler))
        forward = self._steps[step.kind, step.batch, step.queries]
        is_shaped = not slots.isdisjoint(self._shaped)
        is_greedy = masks is None and sampler == "greedy" and not is_shaped and step.kind == "decode"
        packed = layout.pack(step, self.config, is_greedy=is_greedy)
        self._kv, self._state, logits, rows, rest = forward(self._leaves, self._kv, self._state, packed)
        ids = rest
        if not is_greedy:
            mask = None if masks is None else masks(step)
            shaped = logits
            if mask is not None or is_shaped:
                shaped = self._shape(step, logits, rows, mask)
            self._state, ids = self._steps[sampler, step.batch, 1](self._state, shaped, rows)
        self._start_copy(ids)
        if is_shaped:
            self._shaping = self._steps["count", step.batch, 1](self._shaping, rows, ids)
        logprobs = scores = pooled = None
        if not slots.isdisjoint(self._telling):
            logprobs = self._steps["logprobs", step.batch, 1](logits, ids)
            self._start_copy(logprobs)
        if step.kind == "prefill":
            scores, pooled = self._score(step, rest), self._pool(step, rest)
        if logprobs is None and scores is None:
            return Launched(step, ids, pooled=pooled)
        params = tuple(self._params[row.slot] for row in step.rows)
        return Launched(step, ids, logprobs, scores, params, pooled)

    def _loop(self, step: Step, sampler: str) -> jax.Array:
        program = self._steps[f"loop_{sampler}", step.batch, step.iterations]
        packed = layout.pack(step, self.config)
        self._kv, self._state, ids = program(self._leaves, self._kv, self._state, packed)
        self._start_copy(ids)
        return ids

    def _admit(self, slot: int, params: SamplingParams, history: History | None) -> None:
        """A sequence is new in `slot`. Tell the device how to shape its logits, if the request wants that."""
        self._params[slot] = params
        for slots, is_asked in (
            (self._random, params.temperature > 0),
            (self._shaped, history is not None),
            (self._telling, params.logprobs is not None),
        ):
            (slots.add if is_asked else slots.discard)(slot)
        if history is not None:
            new = shaping.slot_shaping(params, history, self.model.vocab_size)
            self._shaping = self._steps["admit", 1, 1](self._shaping, np.int32(slot), new)

    def _shape(self, step: Step, logits: jax.Array, rows: Rows, mask: np.ndarray | None) -> jax.Array:
        flags = np.zeros(step.batch, np.bool_)
        flags[: len(step.rows)] = [row.sample and row.slot in self._shaped for row in step.rows]
        if mask is None:
            mask = self._no_mask[step.batch]
        return self._steps["shape", step.batch, 1](self._shaping, logits, rows, flags, mask)

    def _score(self, step: Step, hidden: jax.Array) -> jax.Array | None:
        wanted = scoring.pack_targets(step, self.config, self.model.vocab_size)
        return None if wanted is None else self._reduce("score", step, hidden, wanted)

    def _pool(self, step: Step, hidden: jax.Array) -> jax.Array | None:
        wanted = pooling.pack_pooled(step, self.config, self.model.vocab_size)
        return None if wanted is None else self._reduce("pool", step, hidden, wanted)

    def _reduce(self, kind: str, step: Step, hidden: jax.Array, wanted: np.ndarray) -> jax.Array:
        states = self._steps["gather", step.batch * step.queries, 1](hidden, wanted)
        found = self._steps[kind, 1, 1](self._leaves, states, wanted)
        self._start_copy(found)
        return found

    def _start_copy(self, array: jax.Array) -> None:
        """Have `array` on its way to the host as soon as it is made."""
        if not self._is_host:
            array.copy_to_host_async()

    def fetch(self, handle: Handle) -> tuple[StepResult, ...]:
        """Wait for the ids of a launch, and the log-probabilities that were asked for."""
        return tuple(map(_result, handle))


def _result(launched: Launched) -> StepResult:
    step = launched.step
    sampled = np.asarray(launched.ids)  # waits
    ids = tuple(sampled.T[: len(step.rows)].ravel().tolist())
    logprobs: tuple[TokenLogprobs | None, ...] = ()
    if launched.logprobs is not None:
        counts = [one.logprobs if row.sample else None for row, one in zip(step.rows, launched.params)]
        logprobs = scoring.of_sampled(np.asarray(launched.logprobs), ids, counts)
    prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
    if launched.scores is not None:
        counts = [one.prompt_logprobs for one in launched.params]
        prompt_logprobs = scoring.of_targets(np.asarray(launched.scores), step, counts)
    pooled = None if launched.pooled is None else np.asarray(launched.pooled)[: len(step.rows)]
    return StepResult(ids, logprobs, prompt_logprobs, pooled)


def shapes(config: EngineConfig) -> list[Key]:
    """Every program that the engine can ask for, the costliest to compile first."""
    prefill = [("prefill", batch, queries) for batch, queries in config.prefill_buckets]
    decode = [("decode", batch, 1) for batch in config.decode_buckets]
    batches = sorted({batch for _, batch, _ in prefill + decode})
    num_tokens = sorted({batch * queries for _, batch, queries in prefill})
    loops = [(f"loop_{kind}", batch, config.decode_steps) for _, batch, _ in decode for kind in SAMPLERS]
    return [
        *(loops if config.decode_steps > 1 else ()),
        *(("random", batch, 1) for batch in batches),
        *sorted(prefill + decode, key=lambda key: -key[1] * key[2]),
        ("score", 1, 1),
        ("pool", 1, 1),
        *(("gather", count, 1) for count in num_tokens),
        *((kind, batch, 1) for kind in ("logprobs", "shape", "greedy", "count") for batch in batches),
        ("admit", 1, 1),
    ]


def rows_of(batch: int) -> Rows:
    """Abstract rows of a sampler's input."""
    return Rows(jax.ShapeDtypeStruct((3, batch), jnp.int32))  # type: ignore[arg-type]


def param_names(decoder: Any) -> list[str]:
    """The decoder's parameters, in the order of its leaves."""
    return [".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.split(decoder)[1])]


def prepare_params(decoder: Any, params: dict[str, jax.Array], backend: Backend) -> list[jax.Array]:
    """`order_params`, in the form that the backend reads. Empties `params` as it goes on."""
    leaves = order_params(decoder, params)
    places = {name: i for i, name in enumerate(param_names(decoder))}
    scales = {name: places[scale_name(name)] for name in places if scale_name(name) in places}
    for name, i in places.items():
        del params[name]
        if name in scales:
            j = scales[name]
            leaves[i], leaves[j] = jax.block_until_ready(backend.prepare(name, Int8(leaves[i], leaves[j])))
        elif not name.endswith(SCALE):
            leaves[i] = jax.block_until_ready(backend.prepare(name, leaves[i]))
    return leaves


def order_params(decoder: Any, params: dict[str, jax.Array]) -> list[jax.Array]:
    """`params` as the flat leaves that `make_forward` takes, each of the shape that the decoder names."""
    leaves = []
    wanted = {".".join(map(str, path)): leaf for path, leaf in nnx.to_flat_state(nnx.split(decoder)[1])}
    if missing := sorted(wanted.keys() - params.keys()):
        raise WeightsError(f"parameters missing: {', '.join(missing[:5])} ({len(missing)} in all)")
    if extra := sorted(params.keys() - wanted.keys()):
        raise WeightsError(f"parameters unknown to the model: {', '.join(extra[:5])} ({len(extra)} in all)")
    for name, leaf in wanted.items():
        found = params[name]
        if (found.shape, found.dtype) != (leaf.shape, leaf.dtype):
            raise WeightsError(
                f"{name}: expected {leaf.dtype}{list(leaf.shape)}, found {found.dtype}{list(found.shape)}"
            )
        leaves.append(found)
    return leaves


def compile_steps(
    decoder: Any,
    leaves: list[jax.Array],
    kv: Any,
    state: Any,
    config: EngineConfig,
    backend: Backend,
    executables: Executables,
    progress: Progress | None = None,
) -> dict[Key, Any]:
    """Every program of `shapes(config)`, several at a time: from `executables`, or compiled and kept there.

    `leaves`, `kv` and `state` may be abstract.
    """
    keys = shapes(config)
    forward = {
        kind: jax.jit(make_forward(kind, decoder, config, backend), donate_argnums=(1, 2))
        for kind in ("prefill", "decode")
    }
    sampler = {
        kind: jax.jit(make_sampler(config, random=kind == "random"), donate_argnums=0) for kind in SAMPLERS
    }
    loops = {
        f"loop_{kind}": jax.jit(
            make_loop(decoder, config, backend, random=kind == "random"), donate_argnums=(1, 2)
        )
        for kind in SAMPLERS
    }
    others = {
        "admit": jax.jit(shaping.admit, donate_argnums=0),
        "shape": jax.jit(shaping.shape),
        "count": jax.jit(shaping.make_count(config), donate_argnums=0),
        "logprobs": jax.jit(scoring.make_logprobs(config)),
        "score": jax.jit(scoring.make_scorer(decoder, config, backend)),
        "gather": jax.jit(scoring.gather),
        "pool": jax.jit(pooling.make_pooler(decoder, config)),
    }
    abstract = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]

    vocab_size, hidden_size = decoder.config.vocab_size, decoder.config.hidden_size
    slots_shaping = shaping.shaping_shapes(config, vocab_size)

    def arguments(key: Key) -> tuple[Any, ...]:
        kind, batch, _ = key
        if kind in forward or kind in loops:
            return abstract, kv, state, jax.ShapeDtypeStruct(layout.packed_shape(*key, config), jnp.int32)
        if kind in ("score", "pool", "gather"):
            num_scored = scoring.num_scored(config, vocab_size)
            wanted = jax.ShapeDtypeStruct((2, num_scored), jnp.int32)
            rows = batch if kind == "gather" else num_scored
            hidden = jax.ShapeDtypeStruct((rows, hidden_size), jnp.float32)
            return (hidden, wanted) if kind == "gather" else (abstract, hidden, wanted)
        if kind == "admit":
            return slots_shaping, jax.ShapeDtypeStruct((), jnp.int32), shaping.slot_shapes(vocab_size)
        logits, ids = (
            jax.ShapeDtypeStruct((batch, *shape), dtype)
            for shape, dtype in (((vocab_size,), jnp.float32), ((), jnp.int32))
        )
        if kind == "shape":
            flags = jax.ShapeDtypeStruct((batch,), jnp.bool_)
            mask = jax.ShapeDtypeStruct((batch, shaping.num_words(vocab_size)), jnp.int32)
            return slots_shaping, logits, rows_of(batch), flags, mask
        if kind == "count":
            return slots_shaping, rows_of(batch), ids
        if kind == "logprobs":
            return logits, ids
        return state, logits, rows_of(batch)

    def result_tree(key: Key) -> Any:
        if key[0] in forward:
            return jax.tree.structure((kv, state, 0, rows_of(key[1]), 0))
        if key[0] in loops:
            return jax.tree.structure((kv, state, 0))
        if key[0] in ("admit", "count"):
            return jax.tree.structure(slots_shaping)
        return jax.tree.structure(0 if key[0] in others else (state, 0))

    def compile_one(key: Key) -> Any:
        args = arguments(key)
        found = executables.load(key, jax.tree.structure((args, {})), result_tree(key))
        if found is None:
            found = {**forward, **loops, **sampler, **others}[key[0]].lower(*args).compile()
            executables.save(key, found)
        return found

    began = time.monotonic()
    compiled: dict[Key, Any] = {}
    # Tracing holds the interpreter's lock and XLA's compiler doesn't: threads overlap the two.
    workers = max(2, min(8, os.cpu_count() or 2))
    with without_jax_cache(), ThreadPoolExecutor(max_workers=workers) as pool:
        futures = {pool.submit(compile_one, key): key for key in keys}
        for count, future in enumerate(as_completed(futures), 1):
            compiled[futures[future]] = future.result()
            if progress is not None:
                progress("compiling steps", count, len(keys))
    executables.prune()
    log.info("prepared %d programs in %.1f s", len(keys), time.monotonic() - began)
    return compiled
