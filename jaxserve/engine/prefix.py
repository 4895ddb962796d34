"""Which full pages hold which tokens, so that a prompt that begins like another need not be computed."""

from __future__ import annotations

from collections.abc import Iterable

TokenIds = tuple[int, ...]


class CachedPage:
    """One full page: its tokens, and through `parent` all tokens before it."""

    __slots__ = ("key", "page", "parent", "salt", "tokens")

    def __init__(self, key: int, parent: CachedPage | None, salt: str | None, tokens: TokenIds, page: int):
        self.key = key
        self.parent = parent  # None: this page is the first of its sequence
        self.salt = salt
        self.tokens = tokens
        self.page = page

    def __repr__(self) -> str:
        return f"CachedPage({self.page}, {len(self.tokens)} tokens, key={self.key:x})"


def page_key(before: object, tokens: TokenIds) -> int:
    """Key of a page: a hash of its tokens and of the key before it; before the first page stands the salt."""
    return hash((before, tokens))


def same_page(entry: CachedPage, parent: CachedPage | None, salt: str | None, tokens: TokenIds) -> bool:
    """Whether the page is what its key promises. By induction so is all that is before it."""
    return entry.parent is parent and entry.tokens == tokens and entry.salt == salt


class Chain:
    """The leading pages of one sequence that the cache knows, and the key of the page after them."""

    __slots__ = ("_key", "entries", "is_open", "salt")

    def __init__(self, salt: str | None):
        self.salt = salt
        self.entries: list[CachedPage] = []
        self.is_open = True  # False: the cache will never know more of it
        self._key: int | None = None  # of the page after the last entry, once it was asked for

    @property
    def last(self) -> CachedPage | None:
        return self.entries[-1] if self.entries else None

    def next_key(self, tokens: TokenIds) -> int:
        """Each page is hashed once, however often it is asked for."""
        if self._key is None:
            last = self.last
            self._key = page_key(self.salt if last is None else last.key, tokens)
        return self._key

    def close(self) -> None:
        """Take back the last entry and all hope of more."""
        self.entries.pop()
        self.is_open = False

    def append(self, entry: CachedPage) -> None:
        self.entries.append(entry)
        self._key = None


class PrefixCache:
    """An index of pages by a chain of hashes over their tokens. Pages are held and freed elsewhere.

    A page may be inserted as soon as the step that writes its last position is launched: steps run in
    order, so whoever finds the page reads it later. It must not be written again until `forget`.
    Two chains whose keys collide are told apart by their tokens; the second one is then not cached.

    With `loses_beginnings` a page may be forgotten before those after it. Nobody finds these any more, but by
    a chain that they are part of; they stay until they are forgotten too, or give their key to another page.
    """

    def __init__(self, *, loses_beginnings: bool = False) -> None:
        self._by_key: dict[int, CachedPage] = {}
        self._by_page: dict[int, CachedPage] = {}
        self._loses_beginnings = loses_beginnings

    def __len__(self) -> int:
        return len(self._by_page)

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    def entries(self) -> Iterable[CachedPage]:
        return self._by_page.values()

    def matches(self, chain: Chain, pages: Iterable[TokenIds]) -> list[CachedPage]:
        """The cached pages that continue `chain` with the tokens of `pages`, up to the first unknown one."""
        found: list[CachedPage] = []
        last = chain.last
        for tokens in pages:
            key = page_key(last.key, tokens) if found and last else chain.next_key(tokens)
            entry = self._by_key.get(key)
            if entry is None or not same_page(entry, last, chain.salt, tokens):
                break
            found.append(entry)
            last = entry
        return found

    def insert(self, chain: Chain, tokens: TokenIds, page: int) -> CachedPage | None:
        """Note that `page` continues `chain` with `tokens`, and lengthen the chain.

        Returns the entry, which names another page when such a page is known already. None: the key
        belongs to other tokens, or the beginning of the chain is lost, and the chain is closed.
        """
        if self._loses_beginnings and not self._is_whole(chain.last):
            chain.is_open = False
            return None
        key = chain.next_key(tokens)
        entry = self._by_key.get(key)
        if entry is not None and self._loses_beginnings and not self._is_whole(entry):
            entry = None
        if entry is None:
            assert page not in self._by_page, f"page {page} is in the cache with other tokens"
            entry = CachedPage(key, chain.last, chain.salt, tokens, page)
            self._by_key[key] = self._by_page[page] = entry
        elif not same_page(entry, chain.last, chain.salt, tokens):
            chain.is_open = False
            return None
        chain.append(entry)
        return entry

    def forget(self, page: int) -> None:
        """The page is about to be given to somebody else."""
        entry = self._by_page.pop(page)
        if self._by_key.get(entry.key) is entry:
            del self._by_key[entry.key]

    def _is_whole(self, entry: CachedPage | None) -> bool:
        """Whether all pages before it, and itself, can be found by their keys."""
        while entry is not None:
            if self._by_key.get(entry.key) is not entry:
                return False
            entry = entry.parent
        return True

    def check(self) -> None:
        """Assert that every page can be reached: its parent, if it has one, is cached too. For tests."""
        for key, entry in self._by_key.items():
            assert entry.key == key
            assert self._by_page[entry.page] is entry
        for page, entry in self._by_page.items():
            assert entry.page == page
            if self._loses_beginnings and not self._is_whole(entry):
                continue
            assert self._by_key[entry.key] is entry
            assert entry.parent is None or self._by_page.get(entry.parent.page) is entry.parent, (
                f"page {page} is cached, but not the page before it"
            )
