from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.pages import TRASH_PAGE, PageAllocator
from jaxserve.errors import OutOfPages


@given(num_pages=st.integers(2, 12), data=st.data())
def test_no_page_is_lost_or_held_by_two_whatever_is_taken_shared_and_freed(num_pages, data):
    pages = PageAllocator(num_pages)
    holders: list[tuple[int, ...]] = []
    for action in data.draw(st.lists(st.sampled_from(["take", "share", "free"]), max_size=30)):
        if action == "take":
            n = data.draw(st.integers(0, num_pages))
            held = {page for holder in holders for page in holder}
            if n > num_pages - 1 - len(held):
                with pytest.raises(OutOfPages, match=f"need {n} KV pages"):
                    pages.take(n)
            else:
                expected = tuple(page for page, _ in zip(pages.preview(), range(n)))
                taken = pages.take(n)
                assert taken == expected
                assert TRASH_PAGE not in taken
                assert not held & set(taken)
                holders.append(taken)
        elif holders:
            index = data.draw(st.integers(0, len(holders) - 1))
            if action == "share":
                pages.share(holders[index])
                holders.append(holders[index])
            else:
                pages.free(holders.pop(index))
        pages.check(holders)
        assert pages.num_free + len({page for holder in holders for page in holder}) == pages.num_total


def test_freeing_twice_is_caught():
    pages = PageAllocator(4)
    taken = pages.take(2)
    pages.free(taken)
    with pytest.raises(AssertionError, match="freed while nobody holds it"):
        pages.free(taken)


def test_sharing_a_free_page_is_caught():
    with pytest.raises(AssertionError, match="shared while nobody holds it"):
        PageAllocator(4).share([1])


def test_a_page_that_a_holder_forgot_is_caught():
    pages = PageAllocator(4)
    pages.take(1)
    with pytest.raises(AssertionError, match="disagree"):
        pages.check([])
