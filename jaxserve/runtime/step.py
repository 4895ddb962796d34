"""The two pure functions that are compiled: a prefill rectangle and a decode step.

Both take the weights as flat leaves, update the donated KV pool and slot state in place, and return one
sampled id a row.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.engine.config import EngineConfig
from jaxserve.models.decoder import Batch, Decoder, KVCache
from jaxserve.ops.backend import Backend
from jaxserve.ops.sampling import sample
from jaxserve.runtime import batch as layout
from jaxserve.runtime.state import NUM_PARAMS, SlotState, unpack_params

StepFunction = Callable[
    [list[jax.Array], KVCache, SlotState, jax.Array], tuple[KVCache, SlotState, jax.Array]
]


def make_step(kind: str, model: Decoder, config: EngineConfig, backend: Backend) -> StepFunction:
    """step(leaves, kv, state, packed) -> (kv, state, ids [B]), for `packed` as in runtime/batch.py.

    `leaves` are the parameters in the order of `jax.tree.leaves(nnx.split(model)[1])`.
    """
    graph, abstract = nnx.split(model)
    structure = jax.tree.structure(abstract)
    read = _read_prefill if kind == "prefill" else _read_decode

    def step(
        leaves: list[jax.Array], kv: KVCache, state: SlotState, packed: jax.Array
    ) -> tuple[KVCache, SlotState, jax.Array]:
        decoder = nnx.merge(graph, jax.tree.unflatten(structure, leaves))
        slots = packed[:, layout.SLOT]
        state, tokens, query_lens, sampled = read(state, packed, config)
        batch = Batch(tokens, state.page_table[slots], packed[:, layout.START], query_lens)
        hidden, kv = decoder.hidden(kv, batch, backend, page_size=config.page_size)
        last = jnp.maximum(query_lens - 1, 0)[:, None, None]
        final = jnp.take_along_axis(hidden, last, axis=1)[:, 0]  # [B, H] only these rows need logits
        logits = decoder.logits(final, backend)
        ids = sample(logits, unpack_params(state.params[slots]), batch.start + query_lens)
        # A row that yields no token leaves its slot's last id alone.
        trash = config.max_num_seqs
        last_id = state.last_id.at[jnp.where(sampled, slots, trash)].set(ids, mode="promise_in_bounds")
        return kv, state._replace(last_id=last_id), ids

    return step


def _read_prefill(
    state: SlotState, packed: jax.Array, config: EngineConfig
) -> tuple[SlotState, jax.Array, jax.Array, jax.Array]:
    """The state with the rows' pages and parameters set; tokens [B, Q]; query_lens and sampled [B]."""
    P, trash = config.pages_per_seq, config.max_num_seqs
    pages_at = layout.PREFILL_HEADER + NUM_PARAMS
    slots = packed[:, layout.SLOT]
    new_pages = packed[:, pages_at : pages_at + P]
    columns = packed[:, layout.FIRST_PAGE, None] + jnp.arange(P)
    columns = jnp.where(jnp.arange(P) < packed[:, layout.NUM_PAGES, None], columns, P)  # P is out: dropped
    page_table = state.page_table.at[slots[:, None], columns].set(new_pages, mode="drop")
    has_params = packed[:, layout.HAS_PARAMS] > 0
    params = state.params.at[jnp.where(has_params, slots, trash)].set(
        packed[:, layout.PREFILL_HEADER : pages_at], mode="promise_in_bounds"
    )
    state = state._replace(page_table=page_table, params=params)
    return state, packed[:, pages_at + P :], packed[:, layout.QUERY_LEN], packed[:, layout.SAMPLE] > 0


def _read_decode(
    state: SlotState, packed: jax.Array, config: EngineConfig
) -> tuple[SlotState, jax.Array, jax.Array, jax.Array]:
    """As `_read_prefill`; each row's one token is what its slot sampled last."""
    slots = packed[:, layout.D_SLOT]
    gained = packed[:, layout.D_NUM_PAGES] > 0
    column = jnp.where(gained, packed[:, layout.D_FIRST_PAGE], config.pages_per_seq)
    page_table = state.page_table.at[slots, column].set(packed[:, layout.D_PAGE], mode="drop")
    query_lens = packed[:, layout.D_QUERY_LEN]
    state = state._replace(page_table=page_table)
    return state, state.last_id[slots][:, None], query_lens, query_lens > 0
