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
ENDED = -1  # in place of the last id: the sequence has ended, its rows are skipped. No token has this id


class SlotState(NamedTuple):
    """By slot. Row `max_num_seqs` is the trash slot, which padding rows read and write."""

    last_id: jax.Array  # [S + 1] int32, sampled last: the input of the slot's next decode; or ENDED
    page_table: jax.Array  # [S + 1, P] int32
    params: jax.Array  # [S + 1, NUM_PARAMS] int32
    end_ids: jax.Array  # [S + 1, MAX_END_IDS] int32, ids after which the sequence has ended; or ENDED


def kv_bytes_per_token(model: ModelConfig, dtype: DType, lanes: int | None = None) -> int:
    """Bytes of keys and values of one position in all layers; `lanes` is the backend's `pool_lanes`."""
    values = math.prod(token_shape(model.num_kv_heads, model.head_dim, lanes))
    return 2 * model.num_layers * values * jnp.dtype(dtype).itemsize


def kv_shapes(
    model: ModelConfig, config: EngineConfig, dtype: DType, lanes: int | None = None
) -> KVCache:
    """The pool as ShapeDtypeStructs; `lanes` is the backend's `pool_lanes`."""
    positions = config.num_pages * config.page_size
    shape = (model.num_layers, positions, *token_shape(model.num_kv_heads, model.head_dim, lanes))
    return KVCache(*(jax.ShapeDtypeStruct(shape, dtype),) * 2)  # type: ignore[arg-type]


def state_shapes(config: EngineConfig) -> SlotState:
    """Shapes of the slot state, trash slot included."""
    slots = config.max_num_seqs + 1
    rows = (slots,), (slots, config.pages_per_seq), (slots, NUM_PARAMS), (slots, MAX_END_IDS)
    return SlotState(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in rows))  # type: ignore[arg-type]


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
