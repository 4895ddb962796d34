from __future__ import annotations

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.config import EngineConfig
from jaxserve.errors import ConfigError


@st.composite
def configs(draw: st.DrawFn, max_num_seqs: int = 70, max_prefill_tokens: int = 700) -> EngineConfig:
    """Any limits that hold together, with derived or with given lists of shapes."""
    page_size = draw(st.integers(1, 20))
    max_model_len = draw(st.integers(2, 400))
    pages_per_seq = -(-max_model_len // page_size)
    max_num_seqs = draw(st.integers(1, max_num_seqs))
    max_prefill_tokens = draw(st.integers(1, max_prefill_tokens))
    shape = st.tuples(st.integers(1, max_num_seqs), st.integers(1, max_prefill_tokens)).filter(
        lambda s: s[0] * s[1] <= max_prefill_tokens
    )
    return EngineConfig(
        max_model_len=max_model_len,
        page_size=page_size,
        num_pages=pages_per_seq + 1 + draw(st.integers(0, 3 * pages_per_seq)),
        max_num_seqs=max_num_seqs,
        max_prefill_tokens=max_prefill_tokens,
        min_prefill_queries=draw(st.integers(1, 64)),
        min_decode_batch=draw(st.integers(1, 4)),
        prefill_step_cost=draw(st.integers(0, 200)),
        decode_buckets=draw(
            st.just(())
            | st.frozensets(st.integers(1, max_num_seqs)).map(lambda s: tuple(sorted(s | {max_num_seqs})))
        ),
        prefill_buckets=draw(st.just(()) | st.frozensets(shape, min_size=1, max_size=6).map(tuple)),
    )


@given(configs())
def test_every_step_that_can_arise_has_a_listed_shape(config):
    for num_rows in range(1, config.max_num_seqs + 1):
        bucket = config.decode_bucket(num_rows)
        assert bucket == min(b for b in config.decode_buckets if b >= num_rows)
    for chunk in range(1, config.max_chunk + 1):
        assert config.prefill_bucket(1, chunk) in config.prefill_buckets
    for batch, queries in config.prefill_buckets:
        assert batch * queries <= config.max_prefill_tokens
        assert batch <= config.max_num_seqs


@given(configs(), st.integers(1, 70), st.integers(1, 700))
def test_the_prefill_bucket_is_the_cheapest_that_fits(config, num_rows, max_query_len):
    fitting = [s for s in config.prefill_buckets if s[0] >= num_rows and s[1] >= max_query_len]
    chosen = config.prefill_bucket(num_rows, max_query_len)
    if not fitting:
        assert chosen is None
    else:
        assert chosen in fitting
        assert chosen[0] * chosen[1] == min(batch * queries for batch, queries in fitting)


def test_derived_shapes_are_powers_of_two_up_to_the_limits():
    config = EngineConfig(max_model_len=1024, num_pages=1000, max_num_seqs=6, max_prefill_tokens=256)
    assert config.decode_buckets == (2, 4, 6)
    assert config.prefill_batches == ((32, (1, 2, 4)), (64, (1, 2, 4)), (128, (1, 2)), (256, (1,)))
    assert config.max_chunk == 256


def test_one_slot_still_decodes_in_two_rows():
    assert EngineConfig(max_model_len=64, num_pages=9, max_num_seqs=1).decode_buckets == (2,)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"page_size": 0}, "page_size=0 must be a whole number of at least 1"),
        ({"page_size": 16.0}, "page_size=16.0 must be a whole number"),
        ({"decode_steps": 0}, "decode_steps=0 must be a whole number of at least 1"),
        ({"decode_steps": 2, "deterministic": True}, "decode_steps=2 contradicts deterministic"),
        ({"max_num_seqs": True}, "max_num_seqs=True must be a whole number"),
        ({"max_num_queued": -1}, "max_num_queued=-1 must be a whole number of at least 0"),
        ({"num_pages": 4}, "num_pages=4 can't hold one sequence of max_model_len=64.* takes 5 pages"),
        ({"decode_buckets": (2, 4)}, "decode_buckets=[2, 4] must ascend and end at max_num_seqs=8"),
        ({"decode_buckets": (4, 2, 8)}, "decode_buckets=[4, 2, 8] must ascend"),
        ({"prefill_buckets": ((1, 1024),)}, "prefill_buckets: 1 x 1024 is over max_prefill_tokens=512"),
        ({"prefill_buckets": ((16, 1),)}, "prefill_buckets: 16 x 1 is over .* max_num_seqs=8"),
        ({"prefill_buckets": ((1, 8), (1, 8))}, "prefill_buckets: 1 x 8 is listed twice"),
        ({"prefill_buckets": ((1,),)}, "prefill_buckets: (1,) is not a pair"),
    ],
)
def test_limits_that_contradict_each_other_are_refused_by_name(wrong, message):
    right = {"max_model_len": 64, "num_pages": 100, "max_num_seqs": 8}
    with pytest.raises(ConfigError, match=re.escape(message).replace(re.escape(".*"), ".*")):
        EngineConfig(**{**right, **wrong})


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"prefix_alignment": 0}, "prefix_alignment=0 must be a whole number of at least 1"),
        ({"prefix_alignment": 24}, "prefix_alignment=24 must be a multiple of page_size=16"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching=1 must be true or false"),
    ],
)
def test_a_prefix_cache_that_can_not_be_is_refused(changes, text):
    with pytest.raises(ConfigError, match=text):
        EngineConfig(max_model_len=64, num_pages=5, **changes)
