"""Which rows the next step has, and on which pages they write."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.kv_pages import KVPages
from jaxserve.engine.packing import pack
from jaxserve.engine.plan import MAX_END_IDS, History, Row, Step
from jaxserve.engine.sequence import Sequence, rank_of
from jaxserve.types import SamplingParams


class StepPlanner:
    """Puts a step together from those who run, by slot. It decides and changes nothing."""

    def __init__(self, config: EngineConfig, kv: KVPages, eos_ids: frozenset[int]):
        self._config = config
        self._kv = kv
        self._eos_ids = eos_ids

    def num_decode_pages(self, decoding: Mapping[int, Sequence]) -> int:
        """New pages that the next decode step takes."""
        page_size = self._config.page_size
        return sum(seq.num_cached == len(seq.pages) * page_size for seq in decoding.values())

    def num_chunk_pages(self, seq: Sequence) -> int:
        """New pages that its next chunk takes."""
        return self._config.pages_for(seq.num_cached + self._chunk(seq)) - len(seq.pages)

    def prefill(
        self, prefilling: Mapping[int, Sequence], decoding: Mapping[int, Sequence]
    ) -> Step | None:
        """The next chunks of those first in line; None when the first one's pages are not free."""
        if not prefilling:
            return None
        room = self._kv.pool.num_free - self.num_decode_pages(decoding)
        candidates, chunks = [], []
        groups: set[str] = set()  # of those who go on here or wait for pages themselves
        for seq in sorted(prefilling.values(), key=rank_of):
            if (group := seq.request.group) is not None:
                if group in groups and self._kv.can_adopt_more(seq):
                    continue  # the first of the group computes these pages for all
                groups.add(group)
            num_pages = self.num_chunk_pages(seq)
            if num_pages <= room:
                candidates.append(seq)
                chunks.append(self._chunk(seq))
                room -= num_pages
            elif not candidates:
                return None
        (batch, queries), chosen = pack(chunks, self._config)
        free = self._kv.pool.preview()
        rows = tuple(self._prefill_row(candidates[i], chunks[i], free) for i in chosen)
        return Step("prefill", batch, queries, rows)

    def decode(self, decoding: Mapping[int, Sequence], *, others_wait: bool) -> Step | None:
        """A row of everybody who decodes; whoever's new page is not free sits out."""
        if not others_wait and (step := self._several(decoding)) is not None:
            return step
        page_size = self._config.page_size
        free = self._kv.pool.preview()
        room = self._kv.pool.num_free
        rows = []
        for slot, seq in decoding.items():
            first_page: int = len(seq.pages)
            new_pages: tuple[int, ...] = ()
            if seq.num_cached == first_page * page_size:
                if not room:
                    continue
                room -= 1
                new_pages = (next(free),)
            elif seq.remaps:
                index, page = seq.remaps[0]
                first_page, new_pages = index, (page,)
            rows.append(Row(slot, seq.num_cached, 1, None, first_page, new_pages, True, None))
        if not rows:
            return None
        return Step("decode", self._config.decode_bucket(len(rows)), 1, tuple(rows))

    def end_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Ids after which the device skips the rows of a sequence, as many as it can keep."""
        eos_ids = frozenset() if params.ignore_eos else self._eos_ids
        return (*sorted(eos_ids), *sorted(params.stop_token_ids - eos_ids))[:MAX_END_IDS]

    def _chunk(self, seq: Sequence) -> int:
        return min(seq.num_to_prefill - seq.num_cached, self._config.max_chunk)

    def _prefill_row(self, seq: Sequence, chunk: int, free: Iterator[int]) -> Row:
        start, end = seq.num_cached, seq.num_cached + chunk
        assert seq.slot is not None
        first_page, new_pages = self._kv.prefill_pages(seq, end, free)
        first_target, targets = seq.targets(start, end)
        return Row(
            slot=seq.slot,
            start=start,
            query_len=chunk,
            tokens=seq.tokens(start, end),
            first_page=first_page,
            new_pages=new_pages,
            sample=end == seq.num_to_prefill,
            params=None if seq.num_told_pages else seq.request.params,
            end_ids=() if seq.num_told_pages else seq.end_ids,
            history=None if seq.num_told_pages else self._history(seq),
            targets=targets,
            first_target=first_target,
            num_pooled=seq.num_to_pool(start, end),
        )

    def _history(self, seq: Sequence) -> History | None:
        params = seq.request.params
        if not params.is_shaped:
            return None
        output_ids = tuple(seq.output_ids[: seq.num_to_prefill - seq.num_prompt])
        # As in vLLM, with `ignore_eos` too: the text would go another way after an EOS.
        end_ids = tuple(sorted(self._eos_ids | params.stop_token_ids)) if params.min_tokens else ()
        return History(seq.request.prompt_ids, output_ids, end_ids)

    def _several(self, decoding: Mapping[int, Sequence]) -> Step | None:
        """Several decode steps in one launch, with pages for all of them.

        None when the pages are not free, or when the logits of a row are wanted on the way.
        """
        iterations = self._config.decode_steps
        if iterations == 1:
            return None
        free = self._kv.pool.preview()
        room = self._kv.pool.num_free
        rows = []
        for slot, seq in decoding.items():
            num_left = seq.request.params.max_tokens - seq.num_launched_outputs
            query_len = min(iterations, num_left)
            first_page = len(seq.pages)
            num_new = self._config.pages_for(seq.num_cached + query_len) - first_page
            room -= num_new
            if room < 0 or not seq.is_plain:
                return None
            new_pages = tuple(islice(free, num_new))
            if not new_pages and seq.remaps:
                first_page, page = seq.remaps[0]
                new_pages = (page,)
            rows.append(Row(slot, seq.num_cached, query_len, None, first_page, new_pages, True, None))
        if all(row.query_len == 1 for row in rows):
            return None
        return Step("decode", self._config.decode_bucket(len(rows)), 1, tuple(rows), iterations)
