"""The device side of the engine: every step compiled ahead, launched without waiting, fetched later."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.plan import Plan, Step, StepResult
from jaxserve.errors import WeightsError
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import DType, abstract_decoder
from jaxserve.ops.backend import Backend
from jaxserve.runtime import batch as layout
from jaxserve.runtime.executables import Executables, fingerprint, without_jax_cache
from jaxserve.runtime.state import kv_shapes, state_shapes, zeros
from jaxserve.runtime.step import Rows, make_forward, make_sampler

log = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
Key = tuple[str, int, int]  # ("prefill" | "decode", B, Q), or ("greedy" | "random", B, 1) for sampling
Handle = list[tuple[Step, jax.Array]]


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
        cache: Path | None = None,
        progress: Progress | None = None,
    ):
        self.model, self.config, self.backend = model, config, backend
        decoder = abstract_decoder(model, dtype)
        self._leaves = prepare_params(decoder, params, backend)
        name = fingerprint(model, config, backend.attention_name, backend.linear_name, str(jnp.dtype(dtype)))
        executables = Executables(cache, name)
        kv, state = kv_shapes(model, config, dtype, backend.pool_lanes), state_shapes(config)
        prepare = partial(
            compile_steps, decoder, self._leaves, kv, state, config, backend, executables, progress
        )
        self._steps = prepare()
        self._kv: Any = zeros(kv)
        self._state: Any = zeros(state)
        try:
            self._try_out()
        except jax.errors.JaxRuntimeError as error:
            # A program from the disk may load and yet not run; what was donated to it is gone.
            log.warning("kept programs don't run, all are compiled again: %s", error)
            executables.clear()
            self._steps = prepare()
            self._kv, self._state = zeros(kv), zeros(state)
            self._try_out()
        self._is_random = [False] * config.max_num_seqs  # by slot: its sampling parameters say so

    def _try_out(self) -> None:
        """Run the smallest decode step on rows that are all padding, and both samplers behind it."""
        batch = self.config.decode_buckets[0]
        packed = layout.pack(Step("decode", batch, 1, ()), self.config)
        self._kv, self._state, logits, rows = self._steps["decode", batch, 1](
            self._leaves, self._kv, self._state, packed
        )
        for kind in ("greedy", "random"):
            self._state, ids = self._steps[kind, batch, 1](self._state, logits, rows)
        jax.block_until_ready(ids)

    def launch(self, plan: Plan) -> Handle:
        """Start the plan's steps on the device, in order, and the copies of their ids to the host."""
        handle: Handle = []
        for step in plan.steps:
            forward = self._steps[step.kind, step.batch, step.queries]
            sampler = self._steps[self._sampler_kind(step), step.batch, 1]
            packed = layout.pack(step, self.config)
            self._kv, self._state, logits, rows = forward(self._leaves, self._kv, self._state, packed)
            self._state, ids = sampler(self._state, logits, rows)
            ids.copy_to_host_async()
            handle.append((step, ids))
        return handle

    def _sampler_kind(self, step: Step) -> str:
        for row in step.rows:
            if row.params is not None:
                self._is_random[row.slot] = row.params.temperature > 0
        is_random = self._is_random
        return "random" if any(row.sample and is_random[row.slot] for row in step.rows) else "greedy"

    def fetch(self, handle: Handle) -> tuple[StepResult, ...]:
        """Wait for the ids of a launch."""
        return tuple(StepResult(tuple(np.asarray(ids)[: len(step.rows)].tolist())) for step, ids in handle)


def shapes(config: EngineConfig) -> list[Key]:
    """Every program that the engine can ask for, the costliest to compile first."""
    prefill = [("prefill", batch, queries) for batch, queries in config.prefill_buckets]
    decode = [("decode", batch, 1) for batch in config.decode_buckets]
    batches = sorted({batch for _, batch, _ in prefill + decode})
    return [
        *(("random", batch, 1) for batch in batches),
        *sorted(prefill + decode, key=lambda key: -key[1] * key[2]),
        *(("greedy", batch, 1) for batch in batches),
    ]


def rows_of(batch: int) -> Rows:
    """Abstract rows of a sampler's input."""
    index = jax.ShapeDtypeStruct((batch,), jnp.int32)
    return Rows(index, index, jax.ShapeDtypeStruct((batch,), jnp.bool_))  # type: ignore[arg-type]


def param_names(decoder: Any) -> list[str]:
    """The decoder's parameters, in the order of its leaves."""
    return [".".join(map(str, path)) for path, _ in nnx.to_flat_state(nnx.split(decoder)[1])]


def prepare_params(decoder: Any, params: dict[str, jax.Array], backend: Backend) -> list[jax.Array]:
    """`order_params`, in the form that the backend reads. Empties `params` as it goes on."""
    leaves = order_params(decoder, params)
    for i, name in enumerate(param_names(decoder)):
        del params[name]
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
        kind: jax.jit(make_sampler(config, random=kind == "random"), donate_argnums=0)
        for kind in ("greedy", "random")
    }
    abstract = [jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in leaves]

    def arguments(key: Key) -> tuple[Any, ...]:
        kind, batch, _ = key
        if kind in forward:
            return abstract, kv, state, jax.ShapeDtypeStruct(layout.packed_shape(*key, config), jnp.int32)
        return state, jax.ShapeDtypeStruct((batch, decoder.config.vocab_size), jnp.float32), rows_of(batch)

    def result_tree(key: Key) -> Any:
        if key[0] in forward:
            return jax.tree.structure((kv, state, 0, rows_of(key[1])))
        return jax.tree.structure((state, 0))

    def compile_one(key: Key) -> Any:
        args = arguments(key)
        found = executables.load(key, jax.tree.structure((args, {})), result_tree(key))
        if found is None:
            found = {**forward, **sampler}[key[0]].lower(*args).compile()
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
