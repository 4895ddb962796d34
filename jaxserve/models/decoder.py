"""The decoder that all families with standard wiring share, built and named by flax nnx.

All layers' weights of one kind are one array with a leading layer axis L, and one loop runs over the
layers: a step is traced and compiled once, not L times (thirty unrolled layers took 11 - 13 s of CPU time a
step; one loop takes 1.5 - 2 s). Operations take the stacked array and the layer's
index, so that a kernel reads its layer in place. Parameters carry logical axis names; compiled code takes
them as flat leaves and merges them inside the traced function.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxserve.models.config import ModelConfig, RopeScaling
from jaxserve.models.rope_scaling import frequencies
from jaxserve.ops.backend import Backend
from jaxserve.ops.moe import mix_experts, route
from jaxserve.ops.norm import rms_norm
from jaxserve.ops.paging import write_indices
from jaxserve.ops.quant import Int8, Matrix, is_quantised, scale_shape
from jaxserve.ops.rope import apply_rope, rope_angles

DType = Any  # what jnp.zeros takes: jnp.bfloat16, "float32"
NO_WINDOW = 1 << 30  # a window no context reaches: one integer serves layers with and without


class Batch(NamedTuple):
    """One step's input on the device, rows right-padded to Q queries."""

    tokens: jax.Array  # [B, Q]
    page_table: jax.Array  # [B, P]
    start: jax.Array  # [B] tokens already in the cache
    query_lens: jax.Array  # [B] 0 marks an empty row


class KVCache(NamedTuple):
    """The paged pool of all layers."""

    keys: jax.Array  # [L, pages * page_size, K, D], or rows of W: see ops/paging.py
    values: jax.Array  # the same


class Places(NamedTuple):
    """What every layer needs to know of where this step's tokens are; computed once a step."""

    write: jax.Array  # [B, Q] pool index of each token
    is_live: jax.Array  # [B, Q] bool: not padding
    cos: jax.Array  # [R, B, Q, D/2], one table for each RoPE of the model
    sin: jax.Array
    table_of_layer: jax.Array  # [L] which of the R tables
    window_of_layer: jax.Array  # [L] int32
    page_table: jax.Array
    context_lens: jax.Array
    query_lens: jax.Array
    page_size: int


class Linear(nnx.Module):
    """A dense layer: weight [out, in], or [L, out, in] for all layers at once; a bias [L, out] is float32.

    In int8 it has a float32 `scale` [..., out, in / group] too; see ops/quant.py.
    """

    def __init__(self, shape: tuple[int, ...], axes: tuple[str, ...], dtype: DType, *, bias: bool = False):
        self.weight = nnx.Param(jnp.zeros(shape, dtype), logical_axes=axes)
        self.scale: nnx.Param | None = nnx.data(None)
        self.bias = nnx.Param(jnp.zeros(shape[:-1], jnp.float32), logical_axes=axes[:-1]) if bias else None
        self.axes = axes

    def quantise(self, name: str, quantization: str) -> None:
        """Have int8 weights. `name` is that of the weight, for the error if it can't."""
        shape = self.weight.shape
        scales = scale_shape(name, shape, quantization)
        axes = (*self.axes[:-1], "one" if scales[-1] == 1 else self.axes[-1])
        self.weight = nnx.Param(jnp.zeros(shape, jnp.int8), logical_axes=self.axes)
        self.scale = nnx.Param(jnp.zeros(scales, jnp.float32), logical_axes=axes)

    @property
    def matrix(self) -> Matrix:
        """The weight as a backend takes it."""
        return self.weight[...] if self.scale is None else Int8(self.weight[...], self.scale[...])

    def __call__(
        self, x: jax.Array, backend: Backend, layer: jax.Array | None = None, *, out_dtype: DType = None
    ) -> jax.Array:
        if self.bias is None:
            return backend.linear(x, self.matrix, layer, out_dtype=out_dtype)
        y = backend.linear(x, self.matrix, layer, out_dtype=jnp.float32)
        bias = self.bias[...] if layer is None else self.bias[...][layer]
        return (y + bias).astype(x.dtype if out_dtype is None else out_dtype)


class Norm(nnx.Module):
    """RMS norm; its scale [H], or [L, H], is float32."""

    def __init__(self, shape: tuple[int, ...], eps: float):
        self.weight = nnx.Param(jnp.zeros(shape, jnp.float32), logical_axes=("layers", "norm")[-len(shape) :])
        self.eps = eps

    def __call__(self, x: jax.Array, layer: jax.Array | None = None) -> jax.Array:
        weight = self.weight[...] if layer is None else self.weight[...][layer]
        return rms_norm(x, weight, eps=self.eps)


class Attention(nnx.Module):
    """Grouped-query attention over the paged cache. qkv is one matrix: queries, then keys, then values."""

    def __init__(self, config: ModelConfig, dtype: DType):
        L, N, K, D = config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim
        H = config.hidden_size
        self.qkv = Linear((L, (N + 2 * K) * D, H), ("layers", "heads", "embed"), dtype, bias=config.qkv_bias)
        self.out = Linear((L, H, N * D), ("layers", "embed", "heads"), dtype, bias=config.out_bias)
        q_width, k_width = (N * D, K * D) if config.wide_qk_norm else (D, D)
        self.q_norm = Norm((L, q_width), config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = Norm((L, k_width), config.rms_norm_eps) if config.qk_norm else None
        sinks = lambda: nnx.Param(jnp.zeros((L, N), jnp.float32), logical_axes=("layers", "heads"))
        self.sinks = sinks() if config.attention_sinks else None
        self.config = config

    def __call__(
        self, x: jax.Array, layer: jax.Array, kv: KVCache, places: Places, backend: Backend
    ) -> tuple[jax.Array, KVCache]:
        config = self.config
        B, Q, _ = x.shape
        N, K, D = config.num_heads, config.num_kv_heads, config.head_dim
        heads = self.qkv(x, backend, layer).reshape(B, Q, N + 2 * K, D)
        q, k, v = heads[:, :, :N], heads[:, :, N : N + K], heads[:, :, N + K :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = (
                norm(x.reshape(B, Q, -1), layer).reshape(x.shape) if config.wide_qk_norm else norm(x, layer)
                for norm, x in ((self.q_norm, q), (self.k_norm, k))
            )
        table = places.table_of_layer[layer]
        angles = places.cos[table], places.sin[table]
        q, k = apply_rope(q, angles), apply_rope(k, angles)
        kv = KVCache(
            backend.write_kv(kv.keys, layer, k, places.write),
            backend.write_kv(kv.values, layer, v, places.write),
        )
        mixed = backend.attention(
            q, kv.keys, kv.values, layer, places.window_of_layer[layer],
            places.page_table, places.context_lens, places.query_lens,
            page_size=places.page_size, scale=config.attention_scale, num_kv_heads=K,
            soft_cap=config.attention_soft_cap, sinks=None if self.sinks is None else self.sinks[...][layer],
        )  # fmt: skip
        return self.out(mixed.reshape(B, Q, N * D), backend, layer, out_dtype=jnp.float32), kv


class MLP(nnx.Module):
    """Gated feed-forward. gate_up is one matrix: gate, then up."""

    def __init__(self, config: ModelConfig, dtype: DType):
        L, H, I = config.num_layers, config.hidden_size, config.intermediate_size  # noqa: E741
        self.gate_up = Linear((L, 2 * I, H), ("layers", "mlp", "embed"), dtype, bias=config.mlp_bias)
        self.down = Linear((L, H, I), ("layers", "embed", "mlp"), dtype, bias=config.mlp_bias)
        self.activation = config.activation

    def __call__(self, x: jax.Array, layer: jax.Array, is_live: jax.Array, backend: Backend) -> jax.Array:
        mixed = backend.gate(self.gate_up(x, backend, layer), self.activation)
        return self.down(mixed, backend, layer, out_dtype=jnp.float32)


class MoE(nnx.Module):
    """A router and its experts; those of all layers are one stack of matrices, layer by layer."""

    def __init__(self, config: ModelConfig, dtype: DType):
        assert config.moe is not None
        moe, L, H = config.moe, config.num_layers, config.hidden_size
        LE, I = L * moe.num_experts, moe.expert_size  # noqa: E741
        axes = ("layers", "experts", "embed")
        self.router = Linear((L, moe.num_experts, H), axes, dtype, bias=moe.router_bias)
        matrix = lambda rows, columns, axes: Linear(
            (LE, rows, columns), ("layers.experts", *axes), dtype, bias=moe.expert_bias
        )
        self.gate = matrix(I, H, ("mlp", "embed"))
        self.up = matrix(I, H, ("mlp", "embed"))
        self.down = matrix(H, I, ("embed", "mlp"))
        shared = replace(config, intermediate_size=max(1, moe.shared_size), mlp_bias=False)
        self.shared = MLP(shared, dtype) if moe.shared_size else None
        gated = moe.shared_size and moe.shared_gate
        self.shared_router = Linear((L, 1, H), ("layers", "one", "embed"), dtype) if gated else None
        self.config, self.activation = moe, config.activation

    def route(self, logits: jax.Array, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(experts, weights) [T, k] of router logits [T, E]."""
        return route(logits, self.config.num_active, normalise=self.config.normalise)

    def __call__(self, x: jax.Array, layer: jax.Array, is_live: jax.Array, backend: Backend) -> jax.Array:
        E = self.config.num_experts
        rows = x.reshape(-1, x.shape[-1])  # [T, H]
        logits = self.router(rows, backend, layer, out_dtype=jnp.float32)
        experts, weights = self.route(logits, layer)

        def expert(x: jax.Array, number: jax.Array) -> jax.Array:
            at = layer * E + number
            gate_up = jnp.concatenate([self.gate(x, backend, at), self.up(x, backend, at)], axis=-1)
            return self.down(backend.gate(gate_up, self.activation), backend, at, out_dtype=jnp.float32)

        mixed = mix_experts(rows, experts, weights, is_live.reshape(-1), expert, num_experts=E)
        if self.shared is not None:
            shared = self.shared(rows, layer, is_live, backend)
            if self.shared_router is not None:
                router = self.shared_router(rows, backend, layer, out_dtype=jnp.float32)
                shared = jax.nn.sigmoid(router) * shared
            mixed = mixed + shared
        return mixed.reshape(x.shape)


class Layers(nnx.Module):
    """All blocks, pre-norm; with `post_norms` each half's output is normed before it is added (gemma).

    What runs from block to block, `x`, is float32 whatever the weights are: its sum of 60 small terms and
    few large ones is what bfloat16 would spoil most, and it is small beside the weights.
    """

    def __init__(self, config: ModelConfig, dtype: DType):
        norm = lambda: Norm((config.num_layers, config.hidden_size), config.rms_norm_eps)
        self.attention_norm = norm() if config.pre_norms else None
        self.mlp_norm = norm() if config.pre_norms else None
        self.post_attention_norm = norm() if config.post_norms else None
        self.post_mlp_norm = norm() if config.post_norms else None
        self.attention = Attention(config, dtype)
        self.mlp: MLP | MoE = MLP(config, dtype) if config.moe is None else MoE(config, dtype)
        self.dtype = dtype
        self.residual_scale = config.residual_scale
        self.num_layers = config.num_layers

    def run(self, x: jax.Array, kv: KVCache, places: Places, backend: Backend) -> tuple[jax.Array, KVCache]:
        """All layers over `x` [B, Q, H], float32."""

        def one_layer(layer: jax.Array, carry: tuple[jax.Array, KVCache]) -> tuple[jax.Array, KVCache]:
            x, kv = carry
            return self(x, layer, kv, places, backend)

        return jax.lax.fori_loop(0, self.num_layers, one_layer, (x, kv))

    def __call__(
        self, x: jax.Array, layer: jax.Array, kv: KVCache, places: Places, backend: Backend
    ) -> tuple[jax.Array, KVCache]:
        mixed, kv = self.attention(self._before(self.attention_norm, x, layer), layer, kv, places, backend)
        x = x + self._after(self.post_attention_norm, mixed, layer)
        mixed = self.mlp(self._before(self.mlp_norm, x, layer), layer, places.is_live, backend)
        return x + self._after(self.post_mlp_norm, mixed, layer), kv

    def _before(self, norm: Norm | None, x: jax.Array, layer: jax.Array) -> jax.Array:
        return (x if norm is None else norm(x, layer)).astype(self.dtype)

    def _after(self, norm: Norm | None, mixed: jax.Array, layer: jax.Array) -> jax.Array:
        if norm is not None:
            mixed = norm(mixed, layer)
        return mixed if self.residual_scale == 1 else self.residual_scale * mixed


class Decoder(nnx.Module):
    """A whole model. Build it abstractly with `abstract_decoder`; weights come from a loader."""

    def __init__(self, config: ModelConfig, dtype: DType):
        table = (config.vocab_size, config.hidden_size)
        self.embedding = Linear(table, ("vocab", "embed"), dtype)
        self.layers = _layers(config, dtype)
        self.final_norm = Norm((config.hidden_size,), config.rms_norm_eps)
        self.lm_head = None if config.tie_embeddings else Linear(table, ("vocab", "embed"), dtype)
        self.config = config
        self.dtype = dtype

    def hidden(
        self, kv: KVCache, batch: Batch, backend: Backend, *, page_size: int
    ) -> tuple[jax.Array, KVCache]:
        """Run the layers over `batch`, writing keys and values. Returns float32 hidden states [B, Q, H]."""
        config = self.config
        places = _find_places(config, batch, page_size)
        rows = backend.rows(self.embedding.matrix, batch.tokens, config.hidden_size)  # [B, Q, H]
        x = rows.astype(self.dtype)
        if config.embedding_scale is not None:
            x = x * jnp.asarray(config.embedding_scale, x.dtype)
        return self.layers.run(x.astype(jnp.float32), kv, places, backend)

    def logits(self, hidden: jax.Array, backend: Backend) -> jax.Array:
        """Float32 logits [..., V] of `hidden` [..., H]."""
        head = self.embedding if self.lm_head is None else self.lm_head
        logits = head(self.final_norm(hidden).astype(self.dtype), backend, out_dtype=jnp.float32)
        if self.config.logit_scale != 1:
            logits = self.config.logit_scale * logits
        if (cap := self.config.logit_soft_cap) is not None:
            logits = cap * jnp.tanh(logits / cap)
        return logits


def _layers(config: ModelConfig, dtype: DType) -> Any:
    if config.latent is None:
        return Layers(config, dtype)
    from jaxserve.models.latent import LatentLayers  # which is made of this module's parts

    return LatentLayers(config, dtype)


def _find_places(config: ModelConfig, batch: Batch, page_size: int) -> Places:
    Q = batch.tokens.shape[1]
    positions = batch.start[:, None] + jnp.arange(Q)  # [B, Q]
    valid = jnp.arange(Q) < batch.query_lens[:, None]
    ropes = list(dict.fromkeys((layer.rope_theta, layer.rope) for layer in config.layers))
    dim = config.rotary_dim or config.head_dim
    cos, sin = rope_angles(positions, jnp.array([_frequencies(dim, *rope) for rope in ropes], jnp.float32))
    magnitudes = np.array([rope.attention_factor for _, rope in ropes], np.float32)
    if (magnitudes != 1).any():
        cos, sin = cos * magnitudes[:, None, None, None], sin * magnitudes[:, None, None, None]
    windows = [NO_WINDOW if layer.window is None else layer.window for layer in config.layers]
    return Places(
        write=write_indices(batch.page_table, positions, valid, page_size=page_size),
        is_live=valid,
        cos=cos,
        sin=sin,
        table_of_layer=jnp.array([ropes.index((x.rope_theta, x.rope)) for x in config.layers], jnp.int32),
        window_of_layer=jnp.array(windows, jnp.int32),
        page_table=batch.page_table,
        context_lens=jnp.where(batch.query_lens > 0, batch.start + batch.query_lens, 0),
        query_lens=batch.query_lens,
        page_size=page_size,
    )


def _frequencies(dim: int, theta: float | None, rope: RopeScaling) -> np.ndarray:
    """[D/2] of one RoPE; all 0, so that nothing turns, without one."""
    if theta is None:
        return np.zeros(dim // 2)
    return frequencies(dim, theta) / np.array(rope.factors or 1.0)


def abstract_decoder(config: ModelConfig, dtype: DType, quantization: str | None = None) -> Decoder:
    """The decoder with ShapeDtypeStructs for weights: names and shapes at no cost in memory.

    `quantization` is one of ops/quant.py's. Raises ConfigError where it does not suit a matrix.
    """

    def build() -> Decoder:
        decoder = Decoder(config, dtype)
        if quantization is not None:
            for path, module in list(nnx.iter_modules(decoder)):
                name = ".".join(map(str, (*path, "weight")))
                if isinstance(module, Linear) and is_quantised(name, module.weight.shape):
                    module.quantise(name, quantization)
        return decoder

    return nnx.eval_shape(build)
