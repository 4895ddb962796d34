from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxserve.engine.pages import TRASH_PAGE, PageAllocator
from jaxserve.errors import OutOfPages


@given(num_pages=st.integers(2, 12), data=st.data())
def test_no_page_is_lost_or_held_by_two_whatever_is_taken_kept_shared_and_freed(num_pages, data):
    evicted: list[int] = []
    pages = PageAllocator(num_pages, evicted.append)
    holders: list[tuple[int, ...]] = []
    cached: list[int] = []  # the model of it: given back first is first
    kept: set[int] = set()
    actions = st.sampled_from(["take", "keep", "share", "reuse", "free"])
    for action in data.draw(st.lists(actions, max_size=40)):
        held = {page for holder in holders for page in holder}
        if action == "take":
            n = data.draw(st.integers(0, num_pages))
            if n > num_pages - 1 - len(held):
                with pytest.raises(OutOfPages, match=f"need {n} KV pages"):
                    pages.take(n)
            else:
                expected = tuple(page for page, _ in zip(pages.preview(), range(n)))
                num_free = num_pages - 1 - len(held) - len(cached)
                out, cached = cached[: max(0, n - num_free)], cached[max(0, n - num_free) :]
                kept -= set(out)
                evicted.clear()
                taken = pages.take(n)
                assert taken == expected
                assert evicted == out
                assert TRASH_PAGE not in taken
                assert not held & set(taken)
                holders.append(taken)
        elif action == "reuse":
            if cached:
                page = cached.pop(data.draw(st.integers(0, len(cached) - 1)))
                pages.share(page)
                holders.append((page,))
        elif holders:
            index = data.draw(st.integers(0, len(holders) - 1))
            if action == "share":
                for page in holders[index]:
                    pages.share(page)
                holders.append(holders[index])
            elif action == "keep":
                for page in holders[index]:
                    pages.keep(page)
                    kept.add(page)
            else:
                gone = holders.pop(index)
                pages.free(gone)
                left = {page for holder in holders for page in holder}
                cached += [page for page in gone if page in kept and page not in left]
        pages.check(holders)
        held = {page for holder in holders for page in holder}
        assert list(pages.preview())[num_pages - 1 - len(held) - len(cached) :] == cached
        assert (pages.num_free, pages.num_cached) == (num_pages - 1 - len(held), len(cached))


def test_freeing_twice_is_caught():
    pages = PageAllocator(4)
    taken = pages.take(2)
    pages.free(taken)
    with pytest.raises(AssertionError, match="freed while nobody holds it"):
        pages.free(taken)


def test_sharing_a_free_page_is_caught():
    with pytest.raises(AssertionError, match="shared while it is free"):
        PageAllocator(4).share(1)


def test_a_page_that_a_holder_forgot_is_caught():
    pages = PageAllocator(4)
    pages.take(1)
    with pytest.raises(AssertionError, match="disagree"):
        pages.check([])
