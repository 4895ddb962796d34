"""Who holds which page of the KV pool."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Set
from itertools import chain

from jaxserve.errors import OutOfPages

TRASH_PAGE = 0  # padding rows write here; it is never handed out


class PageAllocator:
    """Counts references to the pages 1 .. num_pages - 1. Knows nothing of sequences or tokens.

        used     somebody holds it
        cached   nobody holds it, but what is in it is worth keeping: it can be shared again
        free     nobody holds it, and what is in it is worth nothing

    Cached pages are free pages to whoever needs one; they are only handed out last, the one that was given
    back first before the others. `evicted` is told of each. A holder that gives back its pages in reverse
    order so makes sure that the end of a prefix goes before its beginning.
    """

    def __init__(self, num_pages: int, evicted: Callable[[int], None] = lambda page: None):
        self._refs = [0] * num_pages
        self._free: deque[int] = deque(range(TRASH_PAGE + 1, num_pages))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._kept: set[int] = set()  # used or cached: not free when the last holder gives it back
        self._evicted = evicted

    @property
    def num_total(self) -> int:
        return len(self._refs) - 1

    @property
    def num_free(self) -> int:
        """Pages that can be taken, cached ones included."""
        return len(self._free) + len(self._cached)

    @property
    def num_cached(self) -> int:
        return len(self._cached)

    @property
    def kept(self) -> Set[int]:
        """Pages, used or cached, whose contents are worth keeping."""
        return self._kept

    def num_holders(self, page: int) -> int:
        return self._refs[page]

    def preview(self) -> Iterator[int]:
        """The pages that can be taken in the order in which `take` will hand them out. Changes nothing."""
        return chain(self._free, self._cached)

    def take(self, n: int) -> tuple[int, ...]:
        """Return `n` pages with one reference each. Takes all or, raising OutOfPages, none."""
        if n > self.num_free:
            raise OutOfPages(f"need {n} KV pages, {self.num_free} of {self.num_total} are free")
        pages = tuple(self._free.popleft() if self._free else self._evict() for _ in range(n))
        for page in pages:
            self._refs[page] = 1
        return pages

    def keep(self, page: int) -> None:
        """From now on the page, which somebody holds, is cached when nobody does."""
        assert self._refs[page] > 0, f"page {page} is to be kept while nobody holds it"
        self._kept.add(page)

    def share(self, page: int) -> None:
        """Add one reference to a page that is used or cached."""
        if not self._refs[page]:
            assert page in self._cached, f"page {page} is shared while it is free"
            del self._cached[page]
        self._refs[page] += 1

    def free(self, pages: Iterable[int]) -> None:
        """Give back one reference to each page; the last one makes the page cached or free."""
        for page in pages:
            assert self._refs[page] > 0, f"page {page} is freed while nobody holds it"
            self._refs[page] -= 1
            if not self._refs[page]:
                if page in self._kept:
                    self._cached[page] = None
                else:
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
        unheld = {p for p, refs in enumerate(self._refs) if not refs} - {TRASH_PAGE}
        assert free | self._cached.keys() == unheld, "a page is lost"
        assert self._cached.keys() == self._kept & unheld, "a page that is kept is not cached, or the reverse"
        assert not free & self._cached.keys(), "a page is both free and cached"

    def _evict(self) -> int:
        page, _ = self._cached.popitem(last=False)
        self._kept.discard(page)
        self._evicted(page)
        return page
