"""The pages of each sequence: taken as positions are reached, shared through the prefix cache, given back."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from itertools import islice

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.pages import PageAllocator
from jaxserve.engine.plan import Row
from jaxserve.engine.prefix import CachedPage, Chain, PrefixCache
from jaxserve.engine.sequence import Sequence

NEVER = sys.maxsize


class KVPages:
    """Owns the page lists of all sequences and what is known of the pool's contents.

        a sequence's pages   [ slid ... | shared ... | own, full, registered ... | own, being filled ]
        chain.entries          every page left of the last bar, in order

    A registered page is never written again. Two sequences that compute the same page at the same time
    each write their own. The one launched second then holds both: its next row tells the device of the
    first one's page, and when that row is launched it gives its own back. Steps run in order, so whatever
    still reads the duplicate runs before its next owner writes.

    Where no layer of the model sees further back than a window, pages that no later query sees are given
    back while the sequence runs: `Sequence.num_slid` leading ones, which the device's page table still names
    and nobody reads. For the same reason as above that may be as soon as the last step that reads them is
    launched.
    """

    def __init__(self, config: EngineConfig):
        self._config = config
        self._page_size = config.page_size
        self._pinned_chunk = config.max_chunk if config.deterministic else None
        self._reserves = config.admission == "reserve"
        self._window = config.window
        self.prefix = PrefixCache(loses_beginnings=config.window is not None)
        self.pool = PageAllocator(config.num_pages, self.prefix.forget)
        self.num_reserved = 0  # pages that those with a slot may come to hold
        self.num_queried_tokens = 0  # of prompts that began
        self.num_hit_tokens = 0

    @property
    def num_used(self) -> int:
        return self.pool.num_total - self.pool.num_free

    def num_shareable(self, seq: Sequence) -> int:
        """Pages that a sequence without a slot could share with those who run."""
        if not self._config.enable_prefix_caching:
            return 0
        found = self._find(seq, Chain(seq.request.cache_salt), 0)
        return sum(self.pool.num_holders(entry.page) > 0 for entry in found)

    def can_reserve(self, seq: Sequence) -> bool:
        """Whether all pages that the sequence may come to hold can be held back by count."""
        return self.num_reserved + seq.most_pages <= self.pool.num_total

    def begin(self, seq: Sequence) -> None:
        """The sequence has a slot and no page yet."""
        assert not seq.pages, f"{seq} holds pages before its first step"
        self.num_reserved += seq.most_pages
        seq.register_at = NEVER
        self._slide_next(seq)
        if not seq.output_ids:
            seq.num_hit = 0
        if self._config.enable_prefix_caching:
            seq.chain = Chain(seq.request.cache_salt)
            self._register_next(seq, self._page_size)
        self.adopt(seq)

    def adopt(self, seq: Sequence) -> None:
        """Take over what the cache knows of the tokens after those that the sequence has.

        What is past the sequence's `hit_limit` is never part of it: it must be computed. Ends at a multiple
        of `hit_alignment`. Costs one look-up when there is nothing.
        """
        chain, page_size = seq.chain, self._page_size
        if chain is None or not chain.is_open or len(chain.entries) * page_size != seq.num_cached:
            return
        found = self._find(seq, chain, seq.num_cached)
        if not found:
            return
        end = seq.num_cached + len(found) * page_size
        for entry in found:
            self.pool.share(entry.page)
            seq.pages.append(entry.page)
            chain.append(entry)
        if not seq.output_ids:
            seq.num_hit += end - seq.num_cached
        seq.num_cached = end
        self._register_next(seq, end + page_size)
        if seq.slide_at <= seq.num_cached:
            self.slide(seq)

    def can_adopt_more(self, seq: Sequence) -> bool:
        """Whether the next page of its prompt need not be computed if another sequence computes it."""
        chain = seq.chain
        if chain is None or not chain.is_open or len(chain.entries) * self._page_size != seq.num_cached:
            return False
        end = min(seq.num_prompt, seq.hit_limit)
        return seq.num_cached < end - end % self._config.hit_alignment

    def _find(self, seq: Sequence, chain: Chain, start: int) -> list[CachedPage]:
        """The pages that the sequence can take over from position `start` on, where `chain` ends."""
        page_size = self._page_size
        end = seq.hit_limit
        tokens = (seq.tokens(at, at + page_size) for at in range(start, end - page_size + 1, page_size))
        found = self.prefix.matches(chain, tokens)
        end = start + len(found) * page_size
        end -= end % self._config.hit_alignment
        return found[: max(0, end - start) // page_size]

    # Rows of a step: decided first, then applied.

    def prefill_pages(self, seq: Sequence, end: int, free: Iterator[int]) -> tuple[int, tuple[int, ...]]:
        """(first_page, new_pages) of a row that ends before position `end`; new ones come from `free`."""
        first, pages = seq.num_told_pages, seq.pages
        if seq.remaps:
            first, pages = min(first, seq.remaps[0][0]), _with_remaps(seq)
        return first, (*pages[first:], *islice(free, self._config.pages_for(end) - len(pages)))

    def take_for(self, seq: Sequence, row: Row) -> None:
        """Take the row's new pages and advance the position. First for all rows of a plan, so that none
        of them finds a page that was given back meanwhile."""
        assert row.start == seq.num_cached, f"{row} does not begin where {seq} is"
        if row.params is not None and seq.chain is not None and not seq.output_ids:
            self.num_queried_tokens += seq.num_prompt
            self.num_hit_tokens += seq.num_hit
        num_new = self._config.pages_for(row.start + row.query_len) - len(seq.pages)
        taken = self.pool.take(num_new)
        assert taken == row.new_pages[len(row.new_pages) - num_new :], f"{row} was to take {taken}"
        seq.pages.extend(taken)
        seq.num_told_pages = len(seq.pages)
        seq.num_cached += row.query_len

    def settle(self, seq: Sequence, row: Row) -> None:
        """Give back the duplicates that the row has replaced, and register what is full by now."""
        end = row.first_page + len(row.new_pages)
        while seq.remaps and row.first_page <= seq.remaps[0][0] < end:
            index, page = seq.remaps.pop(0)
            self.pool.free((seq.pages[index],))
            seq.pages[index] = page
            self.num_reserved -= 1
        if seq.register_at <= seq.num_cached:
            self.register(seq)

    def register(self, seq: Sequence) -> None:
        """Let others find the pages that are full by now and whose tokens are known."""
        chain = seq.chain
        assert chain is not None, f"{seq} has nothing to register"
        num_known = min(seq.num_cached, seq.num_prompt + len(seq.output_ids))
        while seq.register_at <= num_known:
            index = len(chain.entries)
            tokens = seq.tokens(seq.register_at - self._page_size, seq.register_at)
            own = seq.pages[index]
            entry = self.prefix.insert(chain, tokens, own)
            if entry is None:
                break
            if entry.page == own:
                self.pool.keep(own)
            elif self._reserves and self.num_reserved == self.pool.num_total:
                chain.close()  # holding two pages for one, if only for a while, could take another's last
                break
            else:
                self.num_reserved += 1
                self.pool.share(entry.page)
                seq.remaps.append((index, entry.page))
            self._register_next(seq, seq.register_at + self._page_size)
        if not chain.is_open:
            seq.register_at = NEVER

    def slide(self, seq: Sequence) -> None:
        """Give back the pages that no query after `num_cached` sees.

        All of them that were to be registered are: what isn't yet waits for its ids.
        """
        assert self._window is not None
        num_slid = (seq.num_cached - self._window + 1) // self._page_size
        if seq.register_at != NEVER:
            assert seq.chain is not None
            num_slid = min(num_slid, len(seq.chain.entries))
        while seq.remaps and seq.remaps[0][0] < num_slid:  # of duplicates both go
            index, page = seq.remaps.pop(0)
            self.pool.free((seq.pages[index],))
            seq.pages[index] = page
            self.num_reserved -= 1
        self.pool.free(reversed(seq.pages[seq.num_slid : num_slid]))
        seq.num_slid = max(seq.num_slid, num_slid)
        self._slide_next(seq)

    def _slide_next(self, seq: Sequence) -> None:
        if self._window is not None:
            seq.slide_at = (seq.num_slid + 1) * self._page_size + self._window - 1

    def _register_next(self, seq: Sequence, end: int) -> None:
        """Have the page that ends at `end` registered once it is full, if others may share it.

        A deterministic engine shares whole chunks of prompts only. What a shorter chunk or a decode step
        wrote has other bits than what a prompt of the same tokens would compute there.
        """
        chunk = self._pinned_chunk
        is_shared = chunk is None or end <= seq.num_prompt - seq.num_prompt % chunk
        seq.register_at = end if is_shared and seq.registers else NEVER

    def awaits_ids(self, seq: Sequence) -> bool:
        """Whether a full page could be registered if only the ids of its tokens were known."""
        return seq.register_at <= seq.num_cached

    def release(self, seq: Sequence) -> None:
        """Give all pages back, the last one first: so the cache never keeps a page without those before."""
        self.num_reserved -= seq.most_pages + len(seq.remaps)
        self.pool.free(seq.pages[index] for index, _ in seq.remaps)
        self.pool.free(reversed(_with_remaps(seq)[seq.num_slid :]))
        seq.pages, seq.remaps, seq.chain = [], [], None
        seq.register_at = seq.slide_at = NEVER
        seq.num_cached = seq.num_told_pages = seq.num_slid = 0

    def check(self, holders: Iterable[Sequence]) -> None:
        """Assert that every page has its owners and that the cache can reach each of its pages."""
        holders = list(holders)
        held = [seq.pages[seq.num_slid :] for seq in holders]
        self.pool.check([*held, [p for seq in holders for _, p in seq.remaps]])
        self.prefix.check()
        assert self.num_reserved == sum(seq.most_pages + len(seq.remaps) for seq in holders)
        assert not self._reserves or self.num_reserved <= self.pool.num_total
        registered = {entry.page for entry in self.prefix.entries()}
        assert registered == self.pool.kept, "the cache and the pool disagree on what is kept"
        for seq in holders:
            if seq.chain is None:
                continue
            pages = _with_remaps(seq)
            assert [entry.page for entry in seq.chain.entries] == pages[: len(seq.chain.entries)]
            own = pages[max(len(seq.chain.entries), seq.num_slid) :]
            assert not registered & set(own), f"{seq} fills a page of the cache"


def _with_remaps(seq: Sequence) -> list[int]:
    pages = seq.pages.copy()
    for index, page in seq.remaps:
        pages[index] = page
    return pages
