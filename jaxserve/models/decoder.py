"""The decoder that all families with standard wiring share, built and named by flax nnx.

Parameters carry logical axis names; compiled code takes them as flat leaves and merges them inside the
traced function. Layers are a list, unrolled: on CPU a scan over stacked weights copies each slice.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.config import LayerConfig, ModelConfig
from jaxserve.ops.backend import Backend
from jaxserve.ops.norm import rms_norm
from jaxserve.ops.paging import write_indices, write_kv
from jaxserve.ops.rope import apply_rope, rope_angles

DType = Any  # what jnp.zeros takes: jnp.bfloat16, jnp.float32
ACTIVATIONS = {"silu": jax.nn.silu, "gelu_tanh": lambda x: jax.nn.gelu(x, approximate=True)}


class Batch(NamedTuple):
    """One step's input on the device, rows right-padded to Q queries."""

    tokens: jax.Array  # [B, Q]
    page_table: jax.Array  # [B, P]
    start: jax.Array  # [B] tokens already in the cache
    query_lens: jax.Array  # [B] 0 marks an empty row


KVCache = list[tuple[jax.Array, jax.Array]]  # per layer: keys and values, each [pages * page_size, K, D]


class _Places(NamedTuple):
    """What every layer needs to know of where this step's tokens are; computed once a step."""

    write: jax.Array  # [B, Q] flat pool index of each token
    angles: dict[float, tuple[jax.Array, jax.Array]]  # by RoPE base
    page_table: jax.Array
    context_lens: jax.Array
    query_lens: jax.Array
    page_size: int


def _weight(shape: tuple[int, ...], axes: tuple[str, ...], dtype: DType) -> nnx.Param:
    return nnx.Param(jnp.zeros(shape, dtype), logical_axes=axes)


class Linear(nnx.Module):
    """A dense layer without bias; weight [out, in]."""

    def __init__(self, out_size: int, in_size: int, axes: tuple[str, str], dtype: DType):
        self.weight = _weight((out_size, in_size), axes, dtype)

    def __call__(self, x: jax.Array, backend: Backend) -> jax.Array:
        return backend.linear(x, self.weight[...])


class Norm(nnx.Module):
    """RMS norm with its scale [H] in float32."""

    def __init__(self, size: int, eps: float):
        self.weight = _weight((size,), ("norm",), jnp.float32)
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, self.weight[...], eps=self.eps)


class Attention(nnx.Module):
    """Grouped-query attention over the paged cache. qkv is one matrix: queries, then keys, then values."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, dtype: DType):
        N, K, D = config.num_heads, config.num_kv_heads, config.head_dim
        self.qkv = Linear((N + 2 * K) * D, config.hidden_size, ("heads", "embed"), dtype)
        self.out = Linear(config.hidden_size, N * D, ("embed", "heads"), dtype)
        self.q_norm = Norm(D, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = Norm(D, config.rms_norm_eps) if config.qk_norm else None
        self.config, self.layer = config, layer

    def __call__(
        self, x: jax.Array, kv: tuple[jax.Array, jax.Array], places: _Places, backend: Backend
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        config = self.config
        B, Q, _ = x.shape
        N, K, D = config.num_heads, config.num_kv_heads, config.head_dim
        heads = self.qkv(x, backend).reshape(B, Q, N + 2 * K, D)
        q, k, v = heads[:, :, :N], heads[:, :, N : N + K], heads[:, :, N + K :]
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        angles = places.angles[self.layer.rope_theta]
        q, k = apply_rope(q, angles), apply_rope(k, angles)
        kv = write_kv(kv[0], k, places.write), write_kv(kv[1], v, places.write)
        mixed = backend.attention(
            q, *kv, places.page_table, places.context_lens, places.query_lens,
            page_size=places.page_size, scale=config.attention_scale, window=self.layer.window,
        )  # fmt: skip
        return self.out(mixed.reshape(B, Q, N * D), backend), kv


class MLP(nnx.Module):
    """Gated feed-forward. gate_up is one matrix: gate, then up."""

    def __init__(self, config: ModelConfig, dtype: DType):
        H, I = config.hidden_size, config.intermediate_size  # noqa: E741
        self.gate_up = Linear(2 * I, H, ("mlp", "embed"), dtype)
        self.down = Linear(H, I, ("embed", "mlp"), dtype)
        self.activation = config.activation

    def __call__(self, x: jax.Array, backend: Backend) -> jax.Array:
        gate, up = jnp.split(self.gate_up(x, backend), 2, axis=-1)
        return self.down(ACTIVATIONS[self.activation](gate) * up, backend)


class Layer(nnx.Module):
    """Pre-norm block; with `post_norms` each half's output is normed before it is added (gemma)."""

    def __init__(self, config: ModelConfig, layer: LayerConfig, dtype: DType):
        norm = lambda: Norm(config.hidden_size, config.rms_norm_eps)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.post_attention_norm = norm() if config.post_norms else None
        self.post_mlp_norm = norm() if config.post_norms else None
        self.attention = Attention(config, layer, dtype)
        self.mlp = MLP(config, dtype)

    def __call__(
        self, x: jax.Array, kv: tuple[jax.Array, jax.Array], places: _Places, backend: Backend
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        mixed, kv = self.attention(self.attention_norm(x), kv, places, backend)
        x = x + (self.post_attention_norm(mixed) if self.post_attention_norm is not None else mixed)
        mixed = self.mlp(self.mlp_norm(x), backend)
        return x + (self.post_mlp_norm(mixed) if self.post_mlp_norm is not None else mixed), kv


class Decoder(nnx.Module):
    """A whole model. Build it abstractly with `abstract_decoder`; weights come from a loader."""

    def __init__(self, config: ModelConfig, dtype: DType):
        self.embedding = Linear(config.vocab_size, config.hidden_size, ("vocab", "embed"), dtype)
        self.layers = nnx.List([Layer(config, layer, dtype) for layer in config.layers])
        self.final_norm = Norm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = (
            None
            if config.tie_embeddings
            else Linear(config.vocab_size, config.hidden_size, ("vocab", "embed"), dtype)
        )
        self.config = config

    def hidden(
        self, kv: KVCache, batch: Batch, backend: Backend, *, page_size: int
    ) -> tuple[jax.Array, KVCache]:
        """Run the layers over `batch`, writing its keys and values. Returns hidden states [B, Q, H]."""
        config = self.config
        Q = batch.tokens.shape[1]
        positions = batch.start[:, None] + jnp.arange(Q)  # [B, Q]
        valid = jnp.arange(Q) < batch.query_lens[:, None]
        places = _Places(
            write=write_indices(batch.page_table, positions, valid, page_size=page_size),
            angles={
                theta: rope_angles(positions, config.head_dim, theta)
                for theta in sorted({layer.rope_theta for layer in config.layers})
            },
            page_table=batch.page_table,
            context_lens=jnp.where(batch.query_lens > 0, batch.start + batch.query_lens, 0),
            query_lens=batch.query_lens,
            page_size=page_size,
        )
        x = self.embedding.weight[...][batch.tokens]  # [B, Q, H]
        if config.embedding_scale is not None:
            x = x * jnp.asarray(config.embedding_scale, x.dtype)
        out: KVCache = []
        for layer, layer_kv in zip(self.layers, kv, strict=True):
            x, layer_kv = layer(x, layer_kv, places, backend)
            out.append(layer_kv)
        return x, out

    def logits(self, hidden: jax.Array, backend: Backend) -> jax.Array:
        """Float32 logits [..., V] of `hidden` [..., H]."""
        head = self.embedding if self.lm_head is None else self.lm_head
        return head(self.final_norm(hidden), backend).astype(jnp.float32)


def abstract_decoder(config: ModelConfig, dtype: DType) -> Decoder:
    """The decoder with ShapeDtypeStructs for weights: names and shapes at no cost in memory."""
    return nnx.eval_shape(lambda: Decoder(config, dtype))
