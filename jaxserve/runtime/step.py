"""The pure functions that are compiled: the forward pass of a rectangle, and picking a token a row.

They are two programs because they vary in different ways: the forward pass with (B, Q), sampling with B
and with whether any row draws at random. Together they would be compiled for every combination, and a
greedy batch would carry the code of all filters. But decode steps whose rows all take their likeliest token
do that in the forward pass: it costs little there, and spares the host a launch. Several decode steps in one
launch (`make_loop`) need both in one program; these are only made where they are asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.plan import MAX_END_IDS
from jaxserve.models.decoder import Batch, Decoder, KVCache
from jaxserve.ops.backend import Backend
from jaxserve.ops.sampling import greedy, sample
from jaxserve.runtime import batch as layout
from jaxserve.runtime.state import ENDED, NUM_PARAMS, SlotState, unpack_params


class Rows(NamedTuple):
    """What sampling needs of a step's rows; one array, for the reason that SlotState is one."""

    packed: jax.Array  # [3, B] int32: what the properties say, in order

    @classmethod
    def of(cls, slots: jax.Array, positions: jax.Array, sampled: jax.Array) -> Rows:
        """See the properties for what is what."""
        return cls(jnp.stack([slots, positions, sampled.astype(jnp.int32)]))

    @property
    def slots(self) -> jax.Array:
        """[B]"""
        return self.packed[0]

    @property
    def positions(self) -> jax.Array:
        """[B] of the token to pick"""
        return self.packed[1]

    @property
    def sampled(self) -> jax.Array:
        """[B] bool: this row yields a token"""
        return self.packed[2] > 0


Forward = Callable[
    [list[jax.Array], KVCache, SlotState, jax.Array],
    tuple[KVCache, SlotState, jax.Array, Rows, jax.Array],
]
Sampler = Callable[[SlotState, jax.Array, Rows], tuple[SlotState, jax.Array]]
Loop = Callable[
    [list[jax.Array], KVCache, SlotState, jax.Array], tuple[KVCache, SlotState, jax.Array]
]


def make_forward(kind: str, model: Decoder, config: EngineConfig, backend: Backend) -> Forward:
    """forward(leaves, kv, state, packed) -> (kv, state, logits [B, V], rows, hidden or ids).

    kv and state are donated; `packed` is as in runtime/batch.py; `leaves` are the parameters in the order of
    `jax.tree.leaves(nnx.split(model)[1])`. Logits are those of each row's last query. A prefill's last result
    is `hidden` [B * Q, H], what the logits of its other queries can be made from. A decode's is `ids` [B]:
    where `packed` says so those of the greedy sampler, which has set the state's last ids; elsewhere zeros.
    """
    graph, abstract = nnx.split(model)
    structure = jax.tree.structure(abstract)
    read = _read_prefill if kind == "prefill" else _read_decode
    likeliest = make_sampler(config, random=False)

    def forward(
        leaves: list[jax.Array], kv: KVCache, state: SlotState, packed: jax.Array
    ) -> tuple[KVCache, SlotState, jax.Array, Rows, jax.Array]:
        decoder = nnx.merge(graph, jax.tree.unflatten(structure, leaves))
        slots = packed[:, layout.SLOT]
        state, tokens, query_lens, sampled = read(state, packed, config)
        batch = Batch(tokens, state.page_table[slots], packed[:, layout.START], query_lens)
        hidden, kv = decoder.hidden(kv, batch, backend, page_size=config.page_size)
        last = jnp.maximum(query_lens - 1, 0)[:, None, None]
        final = jnp.take_along_axis(hidden, last, axis=1)[:, 0]  # [B, H] only these rows need logits
        logits = decoder.logits(final, backend)
        rows = Rows.of(slots, batch.start + query_lens, sampled)
        if kind == "prefill":
            return kv, state, logits, rows, hidden.reshape(-1, hidden.shape[-1])
        state, ids = jax.lax.cond(
            packed[0, layout.D_IS_GREEDY] > 0,
            likeliest,
            lambda state, logits, rows: (state, jnp.zeros_like(slots)),
            state, logits, rows,
        )  # fmt: skip
        return kv, state, logits, rows, ids

    return forward


def make_sampler(config: EngineConfig, *, random: bool) -> Sampler:
    """sampler(state, logits, rows) -> (state, ids [B]); state is donated, its last ids are set.

    After one of a slot's end ids, the slot has ended: its further decode rows are skipped.

    Without `random` every row takes its likeliest token, whatever its parameters say.
    """
    trash = config.max_num_seqs

    def sampler(state: SlotState, logits: jax.Array, rows: Rows) -> tuple[SlotState, jax.Array]:
        if random:
            ids = sample(logits, unpack_params(state.params[rows.slots]), rows.positions)
        else:
            ids = greedy(logits)
        # A row that yields no token leaves its slot's last id alone.
        target = jnp.where(rows.sampled, rows.slots, trash)
        ends = jnp.any(state.end_ids[rows.slots] == ids[:, None], axis=-1)
        return state.with_last_ids(target, jnp.where(ends, ENDED, ids)), ids

    return sampler


def make_loop(model: Decoder, config: EngineConfig, backend: Backend, *, random: bool) -> Loop:
    """loop(leaves, kv, state, packed) -> (kv, state, ids [K, B]), K = `config.decode_steps`; kv and state are
    donated.

    As K decode steps with their samplers: the forward pass takes what the sampler picked. A row goes on
    for its query_len, or until its slot has ended; the loop goes on while any row does. Ids behind a row's
    end mean nothing.
    """
    graph, abstract = nnx.split(model)
    structure = jax.tree.structure(abstract)
    sampler = make_sampler(config, random=random)
    K = config.decode_steps
    Carry = tuple[jax.Array, KVCache, SlotState, jax.Array]  # iteration, kv, state, ids so far

    def loop(
        leaves: list[jax.Array], kv: KVCache, state: SlotState, packed: jax.Array
    ) -> tuple[KVCache, SlotState, jax.Array]:
        decoder = nnx.merge(graph, jax.tree.unflatten(structure, leaves))
        slots, start = packed[:, layout.D_SLOT], packed[:, layout.D_START]
        state, *_ = _read_decode(state, packed, config)

        def is_live(i: jax.Array, state: SlotState) -> jax.Array:  # [B]
            return (i < packed[:, layout.D_QUERY_LEN]) & (state.last_id[slots] != ENDED)

        def goes_on(carry: Carry) -> jax.Array:
            i, _, state, _ = carry
            return (i < K) & jnp.any(is_live(i, state))

        def decode(carry: Carry) -> Carry:
            i, kv, state, ids = carry
            live = is_live(i, state)
            tokens = jnp.maximum(state.last_id[slots], 0)[:, None]
            batch = Batch(tokens, state.page_table[slots], start + i, live.astype(jnp.int32))
            hidden, kv = decoder.hidden(kv, batch, backend, page_size=config.page_size)
            logits = decoder.logits(hidden[:, 0], backend)
            state, new_ids = sampler(state, logits, Rows.of(slots, batch.start + batch.query_lens, live))
            return i + 1, kv, state, ids.at[i].set(new_ids)

        ids = jnp.full((K, packed.shape[0]), ENDED, jnp.int32)
        _, kv, state, ids = jax.lax.while_loop(goes_on, decode, (jnp.int32(0), kv, state, ids))
        return kv, state, ids

    return loop


def _read_prefill(
    state: SlotState, packed: jax.Array, config: EngineConfig
) -> tuple[SlotState, jax.Array, jax.Array, jax.Array]:
    """The state with the rows' pages and parameters set; tokens [B, Q]; query_lens and sampled [B]."""
    slots = packed[:, layout.SLOT]
    tokens_at = (pages_at := layout.PREFILL_HEADER + NUM_PARAMS + MAX_END_IDS) + config.pages_per_seq
    new_pages = packed[:, pages_at:tokens_at]
    state = state.with_pages(slots, packed[:, layout.FIRST_PAGE], packed[:, layout.NUM_PAGES], new_pages)
    has_params = packed[:, layout.HAS_PARAMS] > 0
    target = jnp.where(has_params, slots, config.max_num_seqs)
    state = state.with_settings(target, packed[:, layout.PREFILL_HEADER : pages_at])
    return state, packed[:, tokens_at:], packed[:, layout.QUERY_LEN], packed[:, layout.SAMPLE] > 0


def _read_decode(
    state: SlotState, packed: jax.Array, config: EngineConfig
) -> tuple[SlotState, jax.Array, jax.Array, jax.Array]:
    """As `_read_prefill`; each row's one token is what its slot sampled last.

    The host learns one step late that a sequence has ended. Its row then becomes one of padding.
    """
    slots, new_pages = packed[:, layout.D_SLOT], packed[:, layout.DECODE_HEADER :]
    state = state.with_pages(slots, packed[:, layout.D_FIRST_PAGE], packed[:, layout.D_NUM_PAGES], new_pages)
    tokens = state.last_id[slots]
    query_lens = jnp.where(tokens == ENDED, 0, packed[:, layout.D_QUERY_LEN])
    return state, jnp.maximum(tokens, 0)[:, None], query_lens, query_lens > 0
