"""Who holds which page of the KV pool."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from jaxserve.errors import OutOfPages

TRASH_PAGE = 0  # padding rows write here; it is never handed out


class PageAllocator:
    """Counts references to the pages 1 .. num_pages - 1. Knows nothing of sequences or tokens.

    Pages are handed out in the order they were freed, oldest first.
    """

    def __init__(self, num_pages: int):
        self._refs = [0] * num_pages
        self._free: deque[int] = deque(range(TRASH_PAGE + 1, num_pages))

    @property
    def num_total(self) -> int:
        return len(self._refs) - 1

    @property
    def num_free(self) -> int:
        return len(self._free)

    def preview(self) -> Iterator[int]:
        """The free pages in the order in which `take` will hand them out. Changes nothing."""
        return iter(self._free)

    def take(self, n: int) -> tuple[int, ...]:
        """Return `n` pages with one reference each. Takes all or, raising OutOfPages, none."""
        if n > len(self._free):
            raise OutOfPages(f"need {n} KV pages, {len(self._free)} of {self.num_total} are free")
        pages = tuple(self._free.popleft() for _ in range(n))
        for page in pages:
            self._refs[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Add one reference to each of these pages, all of them held by someone already."""
        for page in pages:
            assert self._refs[page] > 0, f"page {page} is shared while nobody holds it"
            self._refs[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Give back one reference to each page; the last one makes the page free."""
        for page in pages:
            assert self._refs[page] > 0, f"page {page} is freed while nobody holds it"
            self._refs[page] -= 1
            if not self._refs[page]:
                self._free.append(page)

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Assert that these page lists hold every reference, and that no page is lost. For tests."""
        held = [0] * len(self._refs)
        for pages in holders:
            for page in pages:
                held[page] += 1
        assert held == self._refs, "references and holders disagree"
        assert not self._refs[TRASH_PAGE], "the trash page was handed out"
        free = set(self._free)
        assert len(free) == len(self._free), "a page is free twice"
        assert free == {p for p, refs in enumerate(self._refs) if not refs} - {TRASH_PAGE}, "a page is lost"
