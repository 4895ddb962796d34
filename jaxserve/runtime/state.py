"""What lives on the device between steps: the KV pool, and the decode state by slot."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.plan import MAX_END_IDS
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import DType, KVCache
from jaxserve.ops.paging import token_shape
from jaxserve.ops.sampling import SamplingState
from jaxserve.types import SamplingParams

# Columns of a slot's sampling parameters, int32; floats and the seed's halves by their bits.
TEMPERATURE, TOP_K, TOP_P, MIN_P, SEED_HIGH, SEED_LOW = range(6)
NUM_PARAMS = 6
_END_IDS = 1 + NUM_PARAMS  # columns of SlotState.rows at which these begin
_PAGES = _END_IDS + MAX_END_IDS
ENDED = -1  # in place of the last id: the sequence has ended, its rows are skipped. No token has this id


class SlotState(NamedTuple):
    """By slot. Row `max_num_seqs` is the trash slot, which padding rows read and write.

    One array, because each array that a program takes or gives back costs the host about 5 us a launch.
    """

    rows: jax.Array  # [S + 1, 1 + NUM_PARAMS + MAX_END_IDS + P] int32: what the properties say, in order

    @property
    def last_id(self) -> jax.Array:
        """[S + 1] sampled last: the input of the slot's next decode; or ENDED."""
        return self.rows[:, 0]

    @property
    def params(self) -> jax.Array:
        """[S + 1, NUM_PARAMS]"""
        return self.rows[:, 1:_END_IDS]

    @property
    def end_ids(self) -> jax.Array:
        """[S + 1, MAX_END_IDS] ids after which the sequence has ended; or ENDED."""
        return self.rows[:, _END_IDS:_PAGES]

    @property
    def page_table(self) -> jax.Array:
        """[S + 1, P]"""
        return self.rows[:, _PAGES:]

    def with_last_ids(self, slots: jax.Array, ids: jax.Array) -> SlotState:
        """`ids` [B] are the last ones of `slots` [B]."""
        return SlotState(self.rows.at[slots, 0].set(ids, mode="promise_in_bounds"))

    def with_settings(self, slots: jax.Array, settings: jax.Array) -> SlotState:
        """`settings` [B, NUM_PARAMS + MAX_END_IDS] are the params and end_ids of `slots` [B]."""
        columns = jnp.arange(1, _PAGES)
        return SlotState(self.rows.at[slots[:, None], columns].set(settings, mode="promise_in_bounds"))

    def with_pages(
        self, slots: jax.Array, first: jax.Array, counts: jax.Array, pages: jax.Array
    ) -> SlotState:
        """The first `counts` [B] of `pages` [B, n] are in the page tables of `slots` [B], from column
        `first` [B] on."""
        columns = _PAGES + first[:, None] + jnp.arange(pages.shape[1])
        is_given = jnp.arange(pages.shape[1]) < counts[:, None]
        columns = jnp.where(is_given, columns, self.rows.shape[1])  # that is out: dropped
        return SlotState(self.rows.at[slots[:, None], columns].set(pages, mode="drop"))


def kv_bytes_per_token(model: ModelConfig, dtype: DType, lanes: int | None = None) -> int:
    """Bytes of keys and values of one position in all layers of a pool of `dtype`; `lanes` is the backend's
    `pool_lanes`."""
    values = sum(
        math.prod(token_shape(model.num_kv_heads, size, dtype, lanes))
        for size in (model.head_dim, model.value_head_dim)
    )
    return model.num_layers * values * jnp.dtype(dtype).itemsize


def kv_shapes(
    model: ModelConfig, config: EngineConfig, dtype: DType, lanes: int | None = None
) -> KVCache:
    """The pool, of `dtype`, as ShapeDtypeStructs; `lanes` is the backend's `pool_lanes`."""
    positions = config.num_pages * config.page_size
    pools = (
        (model.num_layers, positions, *token_shape(model.num_kv_heads, size, dtype, lanes))
        for size in (model.head_dim, model.value_head_dim)
    )
    return KVCache(*(jax.ShapeDtypeStruct(shape, dtype) for shape in pools))  # type: ignore[arg-type]


def state_shapes(config: EngineConfig) -> SlotState:
    """Shapes of the slot state, trash slot included."""
    shape = config.max_num_seqs + 1, _PAGES + config.pages_per_seq
    return SlotState(jax.ShapeDtypeStruct(shape, jnp.int32))  # type: ignore[arg-type]


def zeros[Tree](shapes: Tree, make: Callable[..., jax.Array] = jnp.zeros) -> Tree:
    """Fresh device arrays of `shapes`, each from `make(shape, dtype)`."""
    return jax.tree.map(lambda s: make(s.shape, s.dtype), shapes)


def pack_params(params: SamplingParams) -> np.ndarray:
    """A slot's row of `SlotState.params`."""
    row = np.zeros(NUM_PARAMS, np.int32)
    row[[TEMPERATURE, TOP_P, MIN_P]] = np.array(
        [params.temperature, params.top_p, params.min_p], np.float32
    ).view(np.int32)
    row[TOP_K] = min(params.top_k, np.iinfo(np.int32).max)
    seed = params.seed & 0xFFFFFFFFFFFFFFFF
    row[[SEED_HIGH, SEED_LOW]] = np.array([seed >> 32, seed & 0xFFFFFFFF], np.uint32).view(np.int32)
    return row


def unpack_params(rows: jax.Array) -> SamplingState:
    """The sampling parameters of `rows` [B, NUM_PARAMS], on the device."""
    as_float = lambda column: jax.lax.bitcast_convert_type(rows[:, column], jnp.float32)
    return SamplingState(
        temperature=as_float(TEMPERATURE),
        top_k=rows[:, TOP_K],
        top_p=as_float(TOP_P),
        min_p=as_float(MIN_P),
        seed=jax.lax.bitcast_convert_type(rows[:, SEED_HIGH : SEED_LOW + 1], jnp.uint32),
    )
