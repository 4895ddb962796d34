from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.packing import pack
from tests.engine.test_config import configs


def saving(shape, rows, chunks, config):
    """What one rectangle costs less than a step of its own for each row."""

    def cost(shape):
        return shape[0] * shape[1] + config.prefill_step_cost

    return sum(cost(config.prefill_bucket(1, chunks[i])) for i in rows) - cost(shape)


@given(config=configs(max_num_seqs=12, max_prefill_tokens=150), data=st.data())
def test_the_rectangle_holds_the_oldest_and_saves_as_much_as_any_that_is_filled_in_order(config, data):
    chunks = data.draw(st.lists(st.integers(1, config.max_chunk), min_size=1, max_size=12))
    shape, rows = pack(chunks, config)
    assert shape in config.prefill_buckets
    assert rows[0] == 0
    assert rows == sorted(set(rows))
    assert len(rows) <= shape[0]
    assert max(chunks[i] for i in rows) <= shape[1]
    best = 0
    for batch, queries in config.prefill_buckets:
        fitting = [i for i, chunk in enumerate(chunks) if chunk <= queries]
        if chunks[0] <= queries:
            best = max(best, saving((batch, queries), fitting[:batch], chunks, config))
    assert saving(shape, rows, chunks, config) == best


CONFIG = EngineConfig(max_model_len=2048, num_pages=2000, max_prefill_tokens=512, prefill_step_cost=32)


def test_short_prompts_of_like_length_are_prefilled_together():
    assert pack([100, 90, 120, 128], CONFIG) == ((4, 128), [0, 1, 2, 3])


def test_a_short_prompt_is_not_padded_to_the_length_of_a_long_one():
    assert pack([240, 10], CONFIG) == ((1, 256), [0])


def test_a_whole_chunk_of_a_long_prompt_goes_alone():
    assert pack([512, 512, 7], CONFIG) == ((1, 512), [0])


def test_one_that_does_not_fit_does_not_hold_up_those_behind_it():
    assert pack([30, 500, 20, 25, 31], CONFIG) == ((4, 32), [0, 2, 3, 4])
