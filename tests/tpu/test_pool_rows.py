"""The TPU's KV pool, of padded rows, run on the CPU against the pool of [K, D]."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.plan import Row, Step
from jaxserve.models.config import LayerConfig, ModelConfig
from jaxserve.models.decoder import abstract_decoder
from jaxserve.ops.backend import XLA, XLA_TPU, Backend, choose
from jaxserve.runtime.batch import pack
from jaxserve.runtime.state import kv_bytes_per_token, kv_shapes, state_shapes, zeros
from jaxserve.runtime.step import make_forward
from jaxserve.types import SamplingParams

CONFIG = EngineConfig(max_model_len=16, num_pages=12, page_size=4, max_num_seqs=2, max_prefill_tokens=32)


def model(num_kv_heads: int, head_dim: int) -> ModelConfig:
    layers = (LayerConfig(window=5, rope_theta=1e4), LayerConfig(window=None, rope_theta=1e6))
    return ModelConfig(
        family="gemma3", vocab_size=96, hidden_size=24, intermediate_size=40, num_heads=3 * num_kv_heads,
        num_kv_heads=num_kv_heads, head_dim=head_dim, max_position=64, rms_norm_eps=1e-6,
        attention_scale=head_dim**-0.5, activation="gelu_tanh", tie_embeddings=True, embedding_scale=None,
        qk_norm=True, post_norms=True, layers=layers,
    )  # fmt: skip


def logits_of(config: ModelConfig, backend: Backend) -> list[np.ndarray]:
    """Those of a prompt of two chunks of two rows, and of three decode steps behind it."""
    decoder = abstract_decoder(config, jnp.float32)
    rng = np.random.default_rng(0)
    leaves = [
        jnp.asarray(rng.standard_normal(leaf.shape) * 0.3, leaf.dtype)
        for leaf in jax.tree.leaves(nnx.split(decoder)[1])
    ]
    kv = jax.tree.map(
        lambda pool: jnp.full(pool.shape, jnp.nan), kv_shapes(config, CONFIG, jnp.float32, backend.pool_lanes)
    )
    state = zeros(state_shapes(CONFIG))
    forward = {
        kind: jax.jit(make_forward(kind, decoder, CONFIG, backend)) for kind in ("prefill", "decode")
    }
    pages = [(1, 5, 3, 7), (6, 2, 9, 4)]
    params = SamplingParams(max_tokens=8)
    out = []
    for start, stop in ((0, 8), (8, 11)):
        rows = tuple(
            Row(
                slot=slot, start=start, query_len=stop - start, sample=True,
                tokens=tuple(int(x) for x in rng.integers(0, 96, stop - start)),
                first_page=0, new_pages=pages[slot] if start == 0 else (), params=params,
            )
            for slot in range(2)
        )  # fmt: skip
        packed = pack(Step("prefill", 2, 8, rows), CONFIG)
        kv, state, logits, *_ = forward["prefill"](leaves, kv, state, packed)
        out.append(np.asarray(logits))
    for start in (11, 12, 13):
        rows = tuple(
            Row(slot=slot, start=start, query_len=1, sample=True, tokens=None, first_page=0, new_pages=(),
                params=None)
            for slot in range(2)
        )  # fmt: skip
        packed = pack(Step("decode", 2, 1, rows), CONFIG)
        kv, state, logits, *_ = forward["decode"](leaves, kv, state, packed)
        out.append(np.asarray(logits))
    return out


@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(3, 64)])
def test_padded_rows_give_the_logits_of_the_plain_pool(num_kv_heads, head_dim):
    config = model(num_kv_heads, head_dim)
    for padded, plain in zip(logits_of(config, XLA_TPU), logits_of(config, XLA), strict=True):
        assert np.isfinite(plain).all()
        np.testing.assert_array_equal(padded, plain)


def test_a_tokens_size_counts_the_padding_that_the_pool_has():
    config = model(3, 64)
    for lanes in (None, 128):
        pools = kv_shapes(config, CONFIG, jnp.bfloat16, lanes)
        positions = CONFIG.num_pages * CONFIG.page_size
        token = kv_bytes_per_token(config, jnp.bfloat16, lanes)
        assert sum(pool.size * 2 for pool in pools) == positions * token
    assert kv_bytes_per_token(config, jnp.bfloat16, 128) == 2 * 2 * 256 * 2


def test_the_default_device_decides_on_padded_rows(monkeypatch):
    for platform, lanes in (("tpu", 128), ("gpu", None)):
        monkeypatch.setattr("jax.default_backend", lambda platform=platform: platform)
        assert choose().pool_lanes == lanes
