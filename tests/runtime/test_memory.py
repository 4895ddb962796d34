from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import jax
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.engine.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.runtime import memory
from jaxserve.runtime.memory import (
    available_host_bytes,
    default_kv_budget,
    fit_pool,
    memory_use,
    require_room,
)

GIB = 1 << 30


def fit(**changes: int | None) -> tuple[int, int]:
    """A pool of ten pages' bytes, unless changed."""
    values = {
        "budget": 10 * 16 * 100, "bytes_per_token": 100, "page_size": 16, "max_num_seqs": 32,
        "max_model_len": None, "max_position": 2048,
    }  # fmt: skip
    return fit_pool(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "num_pages", "max_model_len"),
    [
        ({}, 10, 144),  # all that fits beside the trash page
        ({"max_model_len": 100}, 10, 100),
        ({"max_model_len": 144}, 10, 144),
        ({"max_position": 64}, 10, 64),  # the model's own limit
        ({"max_position": 64, "max_num_seqs": 2}, 9, 64),  # no more than the slots can fill, and trash
        ({"max_position": 64, "max_num_seqs": 1}, 5, 64),
        ({"max_position": 65, "max_num_seqs": 1}, 6, 65),
        ({"budget": 2 * 1600}, 2, 16),
        ({"budget": 2 * 1600 + 1599}, 2, 16),
        ({"page_size": 1, "budget": 500}, 5, 4),
        ({"most_pages": 9}, 10, 2048),  # of a sequence of any length: the window slides over it
        ({"most_pages": 9, "max_model_len": 500}, 10, 500),
        ({"most_pages": 9, "max_model_len": 16, "max_num_seqs": 2}, 3, 16),
        ({"most_pages": 10}, 10, 144),
    ],
)
def test_a_pool_holds_what_the_budget_allows_and_slots_can_fill(changes, num_pages, max_model_len):
    assert fit(**changes) == (num_pages, max_model_len)


@settings(max_examples=200, derandomize=True)
@given(
    st.integers(1, 10**7), st.integers(1, 2000), st.integers(1, 64), st.integers(1, 64),
    st.none() | st.integers(1, 3000), st.integers(1, 3000),
)  # fmt: skip
def test_a_pool_that_fits_is_a_pool_that_serves(budget, per_token, page_size, slots, length, max_position):
    try:
        num_pages, max_model_len = fit_pool(
            budget=budget, bytes_per_token=per_token, page_size=page_size, max_num_seqs=slots,
            max_model_len=length, max_position=max_position,
        )  # fmt: skip
    except ConfigError:
        needed = (-(-(length or 1) // page_size) + 1) * page_size * per_token
        assert needed > budget or (length or 0) > max_position
        return
    assert num_pages * page_size * per_token <= budget
    assert max_model_len == length if length is not None else max_model_len <= max_position
    # One sequence of the whole length always fits: EngineConfig says so, too.
    EngineConfig(max_model_len, num_pages, page_size=page_size, max_num_seqs=slots)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budget": 1600}, r"kv_cache_memory=1600 bytes holds 1 pages .* at least 2 .* raise kv_"),
        ({"budget": 0}, r"kv_cache_memory=0 bytes holds 0 pages"),
        ({"budget": -5}, r"kv_cache_memory=-5"),
        ({"max_model_len": 145}, r"max_model_len=145 needs 17600 bytes .* is 16000.* at most 144"),
        ({"max_model_len": 2000, "most_pages": 10}, r"max_model_len=2000 needs 17600 bytes .* is 16000"),
        ({"max_model_len": 4096}, r"max_model_len=4096 is over the 2048 positions"),
        ({"max_model_len": 0}, r"max_model_len=0 "),
        ({"max_model_len": -3}, r"max_model_len=-3 "),
        ({"page_size": 0}, r"block_size=0 "),
        ({"page_size": -16}, r"block_size=-16 "),
        ({"max_num_seqs": 0}, r"max_num_seqs=0 "),
    ],
)
def test_what_does_not_fit_is_named_with_its_figures(changes, message):
    with pytest.raises(ConfigError, match=message):
        fit(**changes)


def test_the_named_length_and_budget_are_the_ones_that_work():
    assert fit(max_model_len=144)[1] == 144
    assert fit(max_model_len=145, budget=17600)[1] == 145


# The default budget.


def pretend(monkeypatch: pytest.MonkeyPatch, free: int, cgroup: dict[str, str]) -> None:
    def read_text(path: Path, *args: object, **kwargs: object) -> str:
        if path.name not in cgroup:
            raise FileNotFoundError(path)
        return cgroup[path.name]

    monkeypatch.setattr(memory.Path, "read_text", read_text)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=free))


@pytest.mark.parametrize(
    ("free", "cgroup", "available"),
    [
        (8 * GIB, {}, 8 * GIB),
        (8 * GIB, {"memory.max": "max\n", "memory.current": "5\n"}, 8 * GIB),
        (8 * GIB, {"memory.max": f"{3 * GIB}\n", "memory.current": f"{GIB}\n"}, 2 * GIB),
        (GIB, {"memory.max": f"{3 * GIB}\n", "memory.current": f"{GIB}\n"}, GIB),
        (8 * GIB, {"memory.max": f"{GIB}\n", "memory.current": f"{2 * GIB}\n"}, 0),
    ],
)
def test_free_memory_is_no_more_than_the_container_may_take(monkeypatch, free, cgroup, available):
    pretend(monkeypatch, free, cgroup)
    assert available_host_bytes() == available


@pytest.mark.parametrize(("free", "budget"), [(4 * GIB, GIB), (100 * GIB, 2 * GIB), (0, 0)])
def test_on_cpu_the_pool_gets_a_quarter_of_what_is_free_up_to_two_gib(monkeypatch, free, budget):
    pretend(monkeypatch, free, {})
    assert default_kv_budget() == budget


@pytest.mark.parametrize(("used", "budget"), [(2 * GIB, 7 * GIB), (9 * GIB, 0)])
def test_on_an_accelerator_the_pool_gets_nine_tenths_less_what_is_used(monkeypatch, used, budget):
    stats = {"bytes_limit": 10 * GIB, "bytes_in_use": used}
    device = SimpleNamespace(platform="tpu", memory_stats=lambda: stats)
    monkeypatch.setattr(jax, "devices", lambda: [device])
    assert default_kv_budget() == budget


def test_what_does_not_fit_is_refused_with_the_figures_and_the_remedy(monkeypatch):
    monkeypatch.setattr(memory, "available_host_bytes", lambda: 1000)
    require_room(1000, "the weights", "take less")
    with pytest.raises(ConfigError, match="the weights: 1001 bytes are needed, 1000 are free; take less"):
        require_room(1001, "the weights", "take less")


def test_memory_is_told_in_tokens_and_in_requests_of_full_length():
    config = EngineConfig(max_model_len=100, num_pages=15, page_size=16)  # 7 pages a request
    use = memory_use(12345, 100, config)
    assert (use.weights_bytes, use.kv_bytes_per_token, use.max_model_len) == (12345, 100, 100)
    assert use.kv_bytes == 15 * 16 * 100
    assert (use.kv_tokens, use.num_full_requests) == (14 * 16, 2)
