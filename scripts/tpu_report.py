#!/usr/bin/env python3
"""Compiles the steps for TPUs that aren't there, and reports what the compiler says of memory and traffic.

    .venv/bin/python scripts/tpu_report.py checkpoints/smollm2-135m.gguf checkpoints/gemma3-270m.gguf

Needs the libtpu wheel (`scripts/setup test`), no TPU. A model is a file or folder that `jaxserve serve`
takes, or a .json file of its ModelConfig. docs/tpu.md says what the figures mean.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# Before JAX is imported: the host is a plain CPU, and libtpu must not look for the TPU that it runs on.
os.environ.update(
    JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1",
    ALLOW_MULTIPLE_LIBTPU_LOAD="1",  # no TPU is used: a lock left by another process is no matter
    TPU_ACCELERATOR_TYPE="v6e-4", TPU_WORKER_HOSTNAMES="localhost",
)  # fmt: skip

import jax
import jax.numpy as jnp
from flax import nnx
from jax.experimental import topologies

from jaxserve.engine.config import EngineConfig
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import abstract_decoder
from jaxserve.ops.attention.reference import BLOCK_TOKENS
from jaxserve.ops.backend import XLA_TPU
from jaxserve.runtime import batch as layout
from jaxserve.runtime.memory import DEVICE_SHARE, GIB, fit_pool
from jaxserve.runtime.runner import Key, rows_of
from jaxserve.runtime.state import kv_bytes_per_token, kv_shapes, state_shapes
from jaxserve.runtime.step import make_forward, make_sampler
from jaxserve.weights.model_files import open_model

DTYPE = jnp.bfloat16
MEMORY = {"v5e:2x2": 16 * GIB, "v6e:2x2": 32 * GIB}  # of one chip; steps are compiled for one of the four
PROGRAMS: dict[str, Key] = {
    "decode": ("decode", 8, 1),
    "prefill": ("prefill", 1, 512),
    "greedy": ("greedy", 8, 1),
    "random": ("random", 8, 1),
}
LIVE_TOKENS = 1024  # a row's context, for what a whole step must read
LANES, SUBLANES = 128, 8  # a tile of the last two axes
WIDTH = {"bf16": 2, "f32": 4, "s32": 4, "u32": 4, "pred": 1}
MOVES = ("copy", "copy-start", "transpose", "slice", "dynamic-slice", "slice-start", "gather", "reshape")


@dataclass(frozen=True, slots=True)
class Figures:
    """One program's, in bytes. `ideal_*` are what a perfect program would move."""

    model: str
    topology: str
    program: str
    compile_s: float
    weights: int
    pool: int  # keys and values, padding included
    state: int
    layer_keys: int  # the keys of one layer in the pool
    embedding: int
    relaid_embedding: bool  # the default layout of the table isn't the one rows are gathered from
    arguments: int
    aliased: int
    temporary: int
    counted: int  # as XLA counts: every loop body once
    ideal_counted: int  # the same count of a perfect program
    ideal_step: int  # all weights, and the live keys and values of all rows
    pool_moves: list[str]  # instructions that copy a pool, or a layer of one
    weight_moves: list[str]  # instructions that write a layer's matrix, or a stack of them, to HBM


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="+", metavar="MODEL")
    parser.add_argument("--topologies", nargs="+", default=list(MEMORY), choices=list(MEMORY))
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=list(PROGRAMS))
    parser.add_argument("--quantization", choices=("int8", "int8-channel"), help="of the weights")
    parser.add_argument("--json", action="store_true", help="all figures, one object a line")
    args = parser.parse_args()
    try:
        devices = {name: topologies.get_topology_desc(name, "tpu").devices[0] for name in args.topologies}
    except (RuntimeError, NotImplementedError) as error:
        sys.exit(f"tpu_report: compiling for TPU needs the libtpu wheel (scripts/setup test): {error}")
    # Tracing holds the interpreter's lock and XLA's compiler doesn't.
    with ThreadPoolExecutor(max_workers=2) as pool:
        tasks = [
            pool.submit(
                measure, Path(path).stem, config, topology, devices[topology], program, args.quantization
            )
            for path, config in [(path, model_config(path)) for path in args.models]
            for topology in args.topologies
            for program in args.programs
        ]
        if not args.json:
            print(HEADER)
        for task in tasks:
            figures = task.result()
            print(json.dumps(asdict(figures)) if args.json else table_row(figures), flush=True)


def model_config(path: str) -> ModelConfig:
    if path.endswith(".json"):
        return ModelConfig.from_json(json.loads(Path(path).read_text()))
    files = open_model(path)
    try:
        return files.config
    finally:
        files.close()


def measure(
    name: str, model: ModelConfig, topology: str, device: Any, program: str, quantization: str | None
) -> Figures:
    """Compile one program as the runner would on a chip of `topology`, its pool filling the memory."""
    key = PROGRAMS[program]
    kind, batch, _ = key
    decoder = abstract_decoder(model, DTYPE, quantization)
    leaves = jax.tree.leaves(nnx.split(decoder)[1])
    token = kv_bytes_per_token(model, DTYPE, XLA_TPU.pool_lanes)
    num_pages, max_model_len = fit_pool(
        budget=int(MEMORY[topology] * DEVICE_SHARE) - num_bytes(leaves), bytes_per_token=token,
        page_size=EngineConfig.page_size, max_num_seqs=EngineConfig.max_num_seqs, max_model_len=None,
        max_position=model.max_position,
    )  # fmt: skip
    config = EngineConfig(max_model_len=max_model_len, num_pages=num_pages)
    kv, state = kv_shapes(model, config, DTYPE, XLA_TPU.pool_lanes), state_shapes(config)
    sharding = jax.sharding.SingleDeviceSharding(device)

    def on_device(tree: Any) -> Any:
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree)

    is_forward = kind in ("prefill", "decode")
    function: Any
    arguments: tuple[Any, ...]
    if is_forward:
        packed = jax.ShapeDtypeStruct(layout.packed_shape(*key, config), jnp.int32)
        function = jax.jit(make_forward(kind, decoder, config, XLA_TPU), donate_argnums=(1, 2))
        arguments = leaves, kv, state, packed
    else:
        logits = jax.ShapeDtypeStruct((batch, model.vocab_size), jnp.float32)
        function = jax.jit(make_sampler(config, random=kind == "random"), donate_argnums=0)
        arguments = state, logits, rows_of(batch)
    began = time.monotonic()
    compiled = function.lower(*on_device(arguments)).compile()
    seconds = time.monotonic() - began
    memory, text = compiled.memory_analysis(), compiled.as_text()

    table = math.prod((model.vocab_size, model.hidden_size))
    matrices = [math.prod(leaf.shape[1:]) for leaf in leaves if len(leaf.shape) == 3]
    stacks = {size * n for size in matrices for n in (1, model.num_layers)}
    layer = math.prod(kv.keys.shape[1:])
    width = jnp.dtype(DTYPE).itemsize
    of_layer = num_bytes(leaf.update(shape=leaf.shape[1:]) for leaf in leaves if len(leaf.shape) == 3)
    of_table = num_bytes(leaf for leaf in leaves if leaf.shape[0] == model.vocab_size)
    logits_bytes = batch * model.vocab_size * 4
    if is_forward:
        block = batch * min(BLOCK_TOKENS, max_model_len) * (token // model.num_layers)
        ideal_counted = of_table + of_layer + block + logits_bytes
        live = sum(min(LIVE_TOKENS, layer.window or LIVE_TOKENS) for layer in model.layers)
        ideal_step = num_bytes(leaves) + batch * live * (token // model.num_layers)
    else:
        ideal_counted = ideal_step = logits_bytes
    return Figures(
        model=name, topology=topology, program=program, compile_s=round(seconds, 1),
        weights=num_bytes(leaves), pool=num_bytes(kv) if is_forward else 0, state=num_bytes(state),
        layer_keys=layer * width, embedding=table * width, relaid_embedding=not rows_are_lanes(model),
        arguments=memory.argument_size_in_bytes, aliased=memory.alias_size_in_bytes,
        temporary=memory.temp_size_in_bytes, counted=int(compiled.cost_analysis()["bytes accessed"]),
        ideal_counted=ideal_counted, ideal_step=ideal_step,
        pool_moves=list(moves(text, {layer, layer * model.num_layers}, MOVES)) if is_forward else [],
        weight_moves=list(moves(text, stacks, (*MOVES, "fusion"))) if is_forward else [],
    )  # fmt: skip


def num_bytes(tree: Any) -> int:
    leaves = list(tree) if isinstance(tree, Iterator) else jax.tree.leaves(tree)
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)


def rows_are_lanes(model: ModelConfig) -> bool:
    """Whether XLA keeps the embedding row by row: it takes the order of axes that pads less."""
    padded = lambda minor, major: -(-minor // LANES) * LANES * -(-major // SUBLANES) * SUBLANES
    return padded(model.hidden_size, model.vocab_size) <= padded(model.vocab_size, model.hidden_size)


def moves(hlo: str, sizes: set[int], operations: tuple[str, ...]) -> Iterator[str]:
    """Instructions of optimised HLO that write a bfloat16 array of one of `sizes` elements to HBM.

    What happens inside a fusion isn't written; "S(1)" in a layout is on-chip memory.
    """
    fused = set(re.findall(r"calls=%([\w.\-]+)", hlo))
    computation = ""
    for line in hlo.splitlines():
        if opening := re.match(r"(?:ENTRY )?%([\w.\-]+) \(.*\{$", line):
            computation = opening[1]
        found = re.match(r"\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\(", line)
        if not found or found[3] not in operations or computation in fused:
            continue
        shape = re.match(r"\(?bf16\[([\d,]+)\]\{?([^\s}]*)", found[2])
        if shape and math.prod(map(int, shape[1].split(","))) in sizes and "S(1)" not in shape[2]:
            yield f"{found[1]} = {found[3]} bf16[{shape[1]}]"


HEADER = """\
| model | chip | program | compile s | pool GB | aliased | temporary MB | counted MB | ideal MB | step MB |
| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"""


def table_row(f: Figures) -> str:
    is_aliased = "yes" if f.aliased >= f.pool + f.state else "NO"
    cells = (
        f.model, f.topology.split(":")[0], f.program, f"{f.compile_s:.1f}",
        f"{f.pool / 1e9:.2f}" if f.pool else "", is_aliased, f"{f.temporary / 1e6:.1f}",
        f"{f.counted / 1e6:.0f}", f"{f.ideal_counted / 1e6:.0f}", f"{f.ideal_step / 1e6:.0f}",
    )  # fmt: skip
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
