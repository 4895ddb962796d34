from __future__ import annotations

import sys

import jax.numpy as jnp
import numpy as np

from jaxserve.runtime.huge_pages import HUGE_PAGE, use_huge_pages


def test_arrays_keep_their_place_and_contents_in_huge_pages():
    values = np.random.default_rng(0).standard_normal(5 * HUGE_PAGE // 4).astype(np.float32)
    array, small = jnp.array(values), jnp.arange(7)
    address = array.unsafe_buffer_pointer()
    moved = use_huge_pages([array, small])
    assert 0 <= moved <= array.nbytes and moved % HUGE_PAGE == 0  # 0 where the kernel has no such pages
    assert array.unsafe_buffer_pointer() == address
    np.testing.assert_array_equal(array, values)
    np.testing.assert_array_equal(small, range(7))


def test_elsewhere_than_on_linux_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr("ctypes.CDLL", lambda *args, **kwargs: 1 / 0)
    assert use_huge_pages([jnp.ones(HUGE_PAGE)]) == 0
