#!/usr/bin/env python3
"""Where a decode step's time goes, and how far it is from the memory floor.

    .venv/bin/python scripts/bench_steps.py smollm2-135m --rows 1 8 32 --context 136 1000
    .venv/bin/python scripts/bench_steps.py gemma3-270m --rows 8 --context 136 --sampling

Dense layers, attention and sampling are timed alone, each as one compiled loop over all layers with the
model's own weights; "other" is what is left of the whole step (norms, RoPE, cache writes, loop). Host is
what the engine's thread spends to pack and launch a step while the device works, so it only counts where
it is longer than the step. The floor is (weights + live KV, in bytes) / (read bandwidth measured here).

With --sampling: the greedy step against one with every sampling feature on in every row, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.plan import History, Plan, Row, Step
from jaxserve.launch import compile_cache_folder
from jaxserve.models.decoder import NO_WINDOW, abstract_decoder
from jaxserve.native.library import load
from jaxserve.ops.backend import choose
from jaxserve.ops.quant import Int8, Matrix, scale_name
from jaxserve.runtime.runner import ModelRunner, param_names
from jaxserve.runtime.state import kv_bytes_per_token
from jaxserve.types import SamplingParams
from jaxserve.weights.model_files import open_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--context", type=int, nargs="+", default=[136, 1000])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", choices=("int8", "int8-channel"), default=None)
    parser.add_argument("--kv-cache-dtype", choices=("auto", "int8"), default="auto")
    parser.add_argument("--attention-backend", default="auto")
    parser.add_argument("--linear-backend", default="auto")
    parser.add_argument("--isa", help="C++ kernels of: amx, avx512, avx2 or portable")
    parser.add_argument("--page-size", type=int, default=EngineConfig.page_size)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--sampling", action="store_true", help="compare greedy with every feature on")
    parser.add_argument("--repeat", type=int, default=15, help="median of this many")
    args = parser.parse_args()

    files = open_model(args.model)
    params = files.load_params(args.dtype, quantization=args.quantization)
    model = files.config
    backend = choose(args.attention_backend, args.linear_backend)
    if args.isa is not None:  # before weights are put into its order
        load().use_isa(args.isa)
        backend = replace(backend, kernels=f"C++ kernels for {args.isa}")
    longest = max(args.context) + 2 * args.repeat + 8
    if args.sampling:
        longest = max(longest, 256)
    rows = max(args.rows)
    kv_dtype = args.dtype if args.kv_cache_dtype == "auto" else args.kv_cache_dtype
    config = EngineConfig(
        max_model_len=longest,
        num_pages=rows * -(-longest // args.page_size) + 1,
        page_size=args.page_size,
        max_num_seqs=rows,
        decode_buckets=tuple(sorted({max(2, n) for n in args.rows})),
        prefill_buckets=((1, 32),),
    )
    runner = ModelRunner(
        model, params, config, backend, dtype=args.dtype, quantization=args.quantization,
        kv_dtype=kv_dtype, cache=compile_cache_folder(None),
    )  # fmt: skip
    if args.sampling:
        for context in args.context:
            for count in args.rows:
                print(json.dumps(compare_sampling(runner, config, count, context, args)), flush=True)
        return
    params = dict(zip(param_names(abstract_decoder(model, args.dtype, args.quantization)), runner._leaves))
    bandwidth = read_bandwidth()
    weight_bytes = sum(x.nbytes for x in params.values())
    print(
        f"# {files.name} {args.quantization or args.dtype}, KV {kv_dtype}, attention "
        f"{backend.attention_name}, linear {backend.linear_name}, {backend.kernels}, "
        f"page size {args.page_size}, weights {weight_bytes / 1e6:.0f} MB, reads {bandwidth / 1e9:.1f} GB/s"
    )
    for context in args.context:
        for count in args.rows:
            padded = config.decode_bucket(count)
            whole, host = time_step(runner, config, count, padded, context, args)
            parts = {
                "dense": time_dense(params, model, backend, padded, args),
                "attention": time_attention(runner, model, backend, config, count, padded, context, args),
                "sampling": time_sampling(runner, padded, model.vocab_size, args),
            }
            floor = (weight_bytes + count * context * kv_bytes_per_token(model, kv_dtype)) / bandwidth
            print(
                json.dumps(
                    {"rows": count, "context": context, "step_ms": ms(whole)}
                    | {name: ms(value) for name, value in parts.items()}
                    | {"other": ms(whole - sum(parts.values())), "host": ms(host)}
                    | {"floor_ms": ms(floor), "over_floor": round(whole / floor, 2)}
                ),
                flush=True,
            )


def ms(seconds: float) -> float:
    return round(seconds * 1e3, 2)


def median_s(call, repeat: int) -> float:
    jax.block_until_ready(call())
    times = []
    for _ in range(repeat):
        began = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def read_bandwidth() -> float:
    """Bytes a second that all cores together read from memory: the best of several passes."""
    cores = os.cpu_count() or 1
    blocks = [np.ones(1 << 25, np.float32) for _ in range(cores)]  # 128 MiB each, past every cache
    best = 0.0
    with ThreadPoolExecutor(cores) as pool:
        for _ in range(8):
            began = time.perf_counter()
            list(pool.map(np.max, blocks))  # NumPy's vectorised max is bound by reading
            best = max(best, sum(b.nbytes for b in blocks) / (time.perf_counter() - began))
    return best


def pages_of(slot: int, config: EngineConfig) -> tuple[int, ...]:
    first = 1 + slot * config.pages_per_seq
    return tuple(range(first, first + config.pages_per_seq))


def time_step(runner, config, count, padded, context, args) -> tuple[float, float]:
    """Seconds of a whole decode step, and of the host's part of it (pack and launch)."""
    params = SamplingParams(max_tokens=1, temperature=args.temperature, seed=1)
    for slot in range(count):
        row = Row(slot, context - 1, 1, (1,), 0, pages_of(slot, config), True, params)
        runner.fetch(runner.launch(Plan((Step("prefill", 1, 32, (row,)),))))
    whole, host = [], []
    for i in range(args.repeat + 2):
        rows = tuple(Row(slot, context + i, 1, None, 0, (), True, None) for slot in range(count))
        began = time.perf_counter()
        handle = runner.launch(Plan((Step("decode", padded, 1, rows),)))
        host.append(time.perf_counter() - began)
        runner.fetch(handle)
        whole.append(time.perf_counter() - began)
    return statistics.median(whole[2:]), statistics.median(host[2:])


def every_feature(vocab_size: int) -> SamplingParams:
    """All that a request may ask of sampling, in amounts that clients send."""
    return SamplingParams(
        max_tokens=1 << 20, temperature=0.8, top_k=40, top_p=0.95, min_p=0.01, seed=1,
        repetition_penalty=1.1, frequency_penalty=0.4, presence_penalty=0.3, min_tokens=1 << 19,
        logit_bias=tuple((i, 0.5) for i in range(300)),
        bad_words=tuple((i, i + 1, i + 2) for i in range(50)),
        allowed_token_ids=frozenset(range(vocab_size - 100)),
    )  # fmt: skip


def compare_sampling(runner, config, count, context, args) -> dict[str, float]:
    """Whole decode steps of `count` rows: all greedy, and with every feature on in all rows, in turns."""
    vocab_size, padded = runner.model.vocab_size, config.decode_bucket(count)
    kinds = {"greedy": SamplingParams(1, temperature=0), "every_feature": every_feature(vocab_size)}
    history = History(tuple(i % 1000 for i in range(context)), (), (1, 2, 106))
    times: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(4):
        for kind, params in kinds.items():
            for slot in range(count):
                row = Row(slot, context - 1, 1, (1,), 0, pages_of(slot, config), True, params,
                          history=history if params.is_shaped else None)  # fmt: skip
                runner.fetch(runner.launch(Plan((Step("prefill", 1, 32, (row,)),))))
            for i in range(args.repeat + 1):
                rows = tuple(Row(slot, context + i, 1, None, 0, (), True, None) for slot in range(count))
                began = time.perf_counter()
                runner.fetch(runner.launch(Plan((Step("decode", padded, 1, rows),))))
                times[kind].append(time.perf_counter() - began)
    greedy, every = (statistics.median(times[kind]) for kind in kinds)
    return {
        "rows": count, "context": context, "vocabulary": vocab_size, "greedy_ms": ms(greedy),
        "every_feature_ms": ms(every), "ratio": round(every / greedy, 3),
    }  # fmt: skip


def matrix(params: dict[str, jax.Array], name: str) -> Matrix:
    """What `Backend.linear` takes as the weight of this name."""
    scales = params.get(scale_name(name))
    return params[name] if scales is None else Int8(params[name], scales)


def time_dense(params, model, backend, padded, args) -> float:
    """Seconds of all layers' matrices and the output head."""
    names = ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
    stacked = [matrix(params, f"layers.{name}.weight") for name in names]
    head = matrix(params, "lm_head.weight" if "lm_head.weight" in params else "embedding.weight")

    @jax.jit
    def dense(stacked, head, inputs):
        def body(layer, total):
            for weight, x in zip(stacked, inputs):
                total += backend.linear(x + total.astype(x.dtype), weight, layer)[:, :1].astype(jnp.float32)
            return total

        total = jax.lax.fori_loop(0, model.num_layers, body, jnp.zeros((padded, 1), jnp.float32))
        return total + backend.linear(inputs[0] + total.astype(inputs[0].dtype), head)[:, :1]

    H, I = model.hidden_size, model.intermediate_size  # noqa: E741
    widths = (H, model.num_heads * model.head_dim, H, I)
    inputs = [jnp.zeros((padded, width), args.dtype) for width in widths]
    return median_s(lambda: dense(stacked, head, inputs), args.repeat)


def time_attention(runner, model, backend, config, count, padded, context, args) -> float:
    """Seconds of all layers' attention over `context` tokens, windows included."""
    kv = runner._kv
    q = jnp.ones((padded, 1, model.num_heads, model.head_dim), args.dtype)
    table = jnp.array([pages_of(slot % max(count, 1), config) for slot in range(padded)], jnp.int32)
    live = jnp.arange(padded) < count
    lens = jnp.where(live, context, 0).astype(jnp.int32)
    windows = jnp.array([layer.window or NO_WINDOW for layer in model.layers], jnp.int32)

    @jax.jit
    def attend(keys, values, q, table, lens, query_lens):
        def body(layer, q):
            return backend.attention(
                q, keys, values, layer, windows[layer], table, lens, query_lens,
                page_size=config.page_size, scale=model.attention_scale,
            )  # fmt: skip

        return jax.lax.fori_loop(0, model.num_layers, body, q)

    return median_s(
        lambda: attend(kv.keys, kv.values, q, table, lens, live.astype(jnp.int32)), args.repeat
    )


def time_sampling(runner, padded, vocab_size, args) -> float:
    """Seconds from logits to ids."""
    from jaxserve.runtime.step import Rows

    kind = "random" if args.temperature > 0 else "greedy"
    logits = jax.random.normal(jax.random.key(0), (padded, vocab_size))
    slots = jnp.minimum(jnp.arange(padded), runner.config.max_num_seqs)
    rows = Rows.of(slots, jnp.arange(padded), jnp.ones(padded, bool))

    def call():
        runner._state, ids = runner._steps[kind, padded, 1](runner._state, logits, rows)
        return ids

    return median_s(call, args.repeat)


if __name__ == "__main__":
    main()
