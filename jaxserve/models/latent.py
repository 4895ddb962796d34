"""Decoder layers with latent attention and experts after some dense layers: deepseek-v2 and -v3.

Keys and values of all heads are made from one latent vector a token. The cache holds that vector and the one
key that RoPE turns, which all heads share, instead of them: of DeepSeek-V3 512 + 64 values a token and layer,
where 128 heads of 192 + 128 would take 40960. To read it, what would make keys of latents is multiplied into
the queries, and what would make values into what is found: attention with one key head, whose values are the
first part of the keys.
Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import MLP, DType, KVCache, Linear, MoE, Norm, Places
from jaxserve.ops.backend import Backend
from jaxserve.ops.moe import route_in_groups
from jaxserve.ops.rope import apply_rope

Carry = tuple[jax.Array, KVCache]
LATENT_EPS = 1e-6  # of the norms of latents, whatever the config says of the others


class LatentAttention(nnx.Module):
    """Attention over cached latents [rank] with their turned keys [rope_dim]; the pool of values is empty."""

    def __init__(self, config: ModelConfig, dtype: DType):
        assert config.latent is not None
        self.config, self.latent = config, config.latent
        L, N, H = config.num_layers, config.num_heads, config.hidden_size
        rank, nope, rope, value = (
            self.latent.rank, self.latent.nope_dim, self.latent.rope_dim, self.latent.value_dim,
        )  # fmt: skip
        axes = ("layers", "heads", "embed")
        q_rank = self.latent.query_rank
        self.q_down = None if q_rank is None else Linear((L, q_rank, H), ("layers", "latent", "embed"), dtype)
        self.q_norm = None if q_rank is None else Norm((L, q_rank), LATENT_EPS)
        self.q = Linear((L, N * (nope + rope), H if q_rank is None else q_rank), axes, dtype)
        self.kv_down = Linear((L, rank + rope, H), ("layers", "latent", "embed"), dtype)
        self.kv_norm = Norm((L, rank), LATENT_EPS)
        # [out, in] as of a dense layer: XLA's CPU backend lacks some bfloat16 products of the other order.
        heads = lambda *shape, axes: nnx.Param(
            jnp.zeros(shape, dtype), logical_axes=("layers", "heads", *axes)
        )
        self.key_up = heads(L, N, rank, nope, axes=("latent", "head"))
        self.value_up = heads(L, N, value, rank, axes=("head", "latent"))
        self.out = Linear((L, H, N * value), ("layers", "embed", "heads"), dtype)

    def __call__(
        self, x: jax.Array, layer: jax.Array, kv: KVCache, places: Places, backend: Backend
    ) -> tuple[jax.Array, KVCache]:
        B, Q, _ = x.shape
        rank, nope = self.latent.rank, self.latent.nope_dim
        table = places.table_of_layer[layer]
        angles = places.cos[table], places.sin[table]

        low = x
        if self.q_down is not None and self.q_norm is not None:
            low = self.q_norm(self.q_down(x, backend, layer), layer).astype(x.dtype)
        q = self.q(low, backend, layer).reshape(B, Q, self.config.num_heads, -1)
        key_up, value_up = self.key_up[...][layer], self.value_up[...][layer]
        asked = jnp.einsum("bqnd,nrd->bqnr", q[..., :nope], key_up, preferred_element_type=jnp.float32)
        q = jnp.concatenate([asked.astype(x.dtype), apply_rope(q[..., nope:], angles)], axis=-1)

        down = self.kv_down(x, backend, layer)[:, :, None]  # [B, Q, 1, rank + rope_dim]
        latent = self.kv_norm(down[..., :rank], layer).astype(x.dtype)
        key = jnp.concatenate([latent, apply_rope(down[..., rank:], angles)], axis=-1)
        kv = KVCache(backend.write_kv(kv.keys, layer, key, places.write), kv.values)
        mixed = backend.attention(
            q, kv.keys, kv.keys, layer, places.window_of_layer[layer],
            places.page_table, places.context_lens, places.query_lens,
            page_size=places.page_size, scale=self.config.attention_scale, num_kv_heads=1,
        )[..., :rank]  # fmt: skip
        mixed = jnp.einsum("bqnr,nvr->bqnv", mixed, value_up, preferred_element_type=jnp.float32)
        mixed = mixed.astype(x.dtype).reshape(B, Q, -1)
        return self.out(mixed, backend, layer, out_dtype=jnp.float32), kv


class GroupedMoE(MoE):
    """Experts of which a token takes the best of its best groups, and one that all take."""

    def __init__(self, config: ModelConfig, dtype: DType):
        super().__init__(config, dtype)
        assert config.moe is not None
        bias = lambda: nnx.Param(
            jnp.zeros((config.num_layers, self.config.num_experts), jnp.float32),
            logical_axes=("layers", "experts"),
        )
        self.choice_bias = bias() if config.moe.choice_bias else None

    def route(self, logits: jax.Array, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
        moe = self.config
        bias = None if self.choice_bias is None else self.choice_bias[...][layer]
        return route_in_groups(
            logits, moe.num_active, choice_bias=bias, sigmoid=moe.sigmoid, num_groups=moe.num_groups,
            active_groups=moe.active_groups, normalise=moe.normalise, scale=moe.scale,
        )  # fmt: skip


class LatentLayers(nnx.Module):
    """All blocks: the first ones with an MLP, the others with experts; see decoder.Layers."""

    def __init__(self, config: ModelConfig, dtype: DType):
        assert config.moe is not None
        self.num_layers, self.num_dense = config.num_layers, config.moe.dense_layers
        part = lambda layers: replace(config, layers=layers)
        dense, others = config.layers[: self.num_dense], config.layers[self.num_dense :]
        self.attention_norm = Norm((self.num_layers, config.hidden_size), config.rms_norm_eps)
        self.mlp_norm = Norm((self.num_layers, config.hidden_size), config.rms_norm_eps)
        self.attention = LatentAttention(config, dtype)
        self.dense = MLP(part(dense), dtype) if dense else None
        self.experts = GroupedMoE(part(others), dtype)
        self.dtype = dtype

    def run(self, x: jax.Array, kv: KVCache, places: Places, backend: Backend) -> tuple[jax.Array, KVCache]:
        """All layers over `x` [B, Q, H], float32."""

        def block(mlp: MLP | MoE, first: int) -> Callable[[jax.Array, Carry], Carry]:
            def one_layer(layer: jax.Array, carry: Carry) -> Carry:
                x, kv = carry
                normed = self.attention_norm(x, layer).astype(self.dtype)
                mixed, kv = self.attention(normed, layer, kv, places, backend)
                x = x + mixed
                normed = self.mlp_norm(x, layer).astype(self.dtype)
                return x + mlp(normed, layer - first, places.is_live, backend), kv

            return one_layer

        carry = x, kv
        if self.dense is not None:
            carry = jax.lax.fori_loop(0, self.num_dense, block(self.dense, 0), carry)
        return jax.lax.fori_loop(self.num_dense, self.num_layers, block(self.experts, self.num_dense), carry)
