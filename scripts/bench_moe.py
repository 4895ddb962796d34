#!/usr/bin/env python3
"""Time of the experts of a step against the number that a token takes.

    .venv/bin/python scripts/bench_moe.py --rows 1 8 128

All layers of a mixture, without attention, on random weights and rows: each row takes other experts. "in use"
is how many experts of a layer some row takes, on average; their weights are what has to be read. "as if
dense" compares with the step in which every row takes all experts: what one without choice would cost.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import jax
import jax.numpy as jnp
from flax import nnx
from load_report import show

from jaxserve.models.config import LayerConfig, ModelConfig, MoEConfig
from jaxserve.models.decoder import MoE
from jaxserve.ops.backend import choose
from jaxserve.ops.moe import route

COLUMNS = ("rows", "experts a token", "in use", "step", "of weights in use", "as if dense")


def config(args: argparse.Namespace, num_active: int) -> ModelConfig:
    return ModelConfig(
        family="bench", vocab_size=2, hidden_size=args.hidden, intermediate_size=1, num_heads=1,
        num_kv_heads=1, head_dim=16, max_position=1, rms_norm_eps=1e-6, attention_scale=1.0,
        activation="silu", tie_embeddings=True, embedding_scale=None, qk_norm=False, post_norms=False,
        layers=(LayerConfig(None, 1e4),) * args.layers,
        moe=MoEConfig(args.experts, num_active, args.expert_size, normalise=True),
    )  # fmt: skip


class Mixture:
    """All layers' experts, their weights shared by every choice of `num_active`."""

    def __init__(self, args: argparse.Namespace):
        self._args, self._backend = args, choose()
        key, self._weights = jax.random.key(0), []
        made = nnx.eval_shape(lambda: MoE(config(args, 1), jnp.bfloat16))
        for path, leaf in nnx.to_flat_state(nnx.split(made)[1]):
            key, use = jax.random.split(key)
            weight = jax.random.normal(use, leaf.shape, leaf.dtype) * leaf.shape[-1] ** -0.5
            self._weights.append(self._backend.prepare(".".join(map(str, path)), weight))

    def time_s(self, num_active: int, num_rows: int) -> tuple[float, float]:
        """(median seconds of a step, experts in use of a layer)."""
        model = nnx.eval_shape(lambda: MoE(config(self._args, num_active), jnp.bfloat16))
        graph, abstract = nnx.split(model)
        structure, layers = jax.tree.structure(abstract), self._args.layers
        is_live = jnp.ones((num_rows, 1), bool)

        @jax.jit
        def step(weights: list[jax.Array], x: jax.Array) -> tuple[jax.Array, jax.Array]:
            moe = nnx.merge(graph, jax.tree.unflatten(structure, weights))

            def one(layer: jax.Array, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
                x, in_use = carry
                logits = moe.router(x[:, 0], self._backend, layer, out_dtype=jnp.float32)
                experts, _ = route(logits, num_active, normalise=True)
                in_use += jnp.sum(jnp.bincount(experts.reshape(-1), length=self._args.experts) > 0)
                out = moe(x, layer, is_live, self._backend)
                return (x + out / jnp.linalg.norm(out, axis=-1, keepdims=True)).astype(x.dtype), in_use

            return jax.lax.fori_loop(0, layers, one, (x, jnp.int32(0)))

        x = jax.random.normal(jax.random.key(num_rows), (num_rows, 1, self._args.hidden), jnp.bfloat16)
        _, in_use = jax.block_until_ready(step(self._weights, x))
        times = []
        for _ in range(self._args.repeat):
            began_s = time.perf_counter()
            jax.block_until_ready(step(self._weights, x))
            times.append(time.perf_counter() - began_s)
        return statistics.median(times), float(in_use) / layers


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n")[0])
    parser.add_argument("--experts", type=int, default=32)
    parser.add_argument("--active", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 128])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--expert-size", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--repeat", type=int, default=15)
    args = parser.parse_args()
    mixture, rows = Mixture(args), []
    expert_bytes = 3 * args.hidden * args.expert_size * 2 * args.layers
    for num_rows in args.rows:
        dense_s, _ = mixture.time_s(args.experts, num_rows)
        for num_active in args.active:
            step_s, in_use = mixture.time_s(num_active, num_rows)
            rows.append([
                num_rows, num_active, f"{in_use:.1f} of {args.experts}", f"{1e3 * step_s:.2f} ms",
                f"{in_use * expert_bytes / step_s / 1e9:.1f} GB/s", f"{dense_s / step_s:.1f} x",
            ])  # fmt: skip
            print(*rows[-1], sep="  ", file=sys.stderr)
    show(COLUMNS, rows)


if __name__ == "__main__":
    main()
