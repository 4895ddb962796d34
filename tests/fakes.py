"""Stand-ins for a device and a tokenizer: no jax, no weights."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.plan import MAX_END_IDS, MaskSource, Plan, Row, Step, StepResult
from jaxserve.engine.scheduler import Scheduler
from jaxserve.types import Pooling, SamplingParams, TokenLogprobs

UNWRITTEN = -1
MOST_IDS = 270  # of the fake model, the fake tokenizer's included
HIDDEN = 5  # numbers of its hidden states
GARBAGE = -7  # what padding rows write, and what rows that don't sample or are skipped return

EOS, BOS, TURN = 0, 1, 2


class FakeTokenizer:
    """Three special tokens, the 256 bytes, then longer pieces that begin or end inside characters too."""

    SPECIAL = (b"<eos>", b"<bos>", b"<turn>")
    PIECES = (
        *(text.encode() for text in ("the", " the", "ab", "ba", "stop", "\n\n", "é", "🙂")),
        b"\xc3",
        b"\xa9\xc3",
    )

    def __init__(self) -> None:
        self._bytes = (*self.SPECIAL, *(bytes([b]) for b in range(256)), *self.PIECES)
        self._longest_first = sorted(range(3, len(self._bytes)), key=lambda i: -len(self._bytes[i]))
        self.vocab_size = len(self._bytes)
        self.bos_id: int | None = BOS
        self.eos_id: int | None = EOS
        self.eos_ids = frozenset({EOS})
        self.add_bos = False

    def encode(self, text: str, *, add_bos: bool = False, parse_special: bool = True) -> list[int]:
        rest, ids = text.encode(), [BOS] if add_bos else []
        order = [*range(3), *self._longest_first] if parse_special else self._longest_first
        while rest:
            found = next(i for i in order if rest.startswith(self._bytes[i]))
            ids.append(found)
            rest = rest[len(self._bytes[found]) :]
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        shown = (self._bytes[i] for i in ids if not (skip_special and self.is_special(i)))
        return b"".join(shown).decode("utf-8", errors="replace")

    def token_bytes(self, token_id: int) -> bytes:
        return self._bytes[token_id] if 0 <= token_id < self.vocab_size else b""

    def is_special(self, token_id: int) -> bool:
        return 0 <= token_id < len(self.SPECIAL)

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", errors="replace")


@dataclass(frozen=True)
class FakeModel:
    """The next id is a checksum of the whole context and of the sampling parameters.

    `ids` are those it picks from, all lower-case letters by default; about one in `eos_every` is the EOS.
    With a `window` the context is its last so many ids, wherever one is taken.
    """

    ids: tuple[int, ...] = tuple(3 + byte for byte in b"abcdefghijklmnopqrstuvwxyz ")
    eos_every: int | None = None
    window: int | None = None

    def seen(self, context: Sequence[int]) -> tuple[int, ...]:
        return tuple(context if self.window is None else context[-self.window :])

    def next_id(
        self, context: Sequence[int], params: SamplingParams, allowed: Sequence[int] | None = None
    ) -> int:
        """With `allowed` it picks from those, and an EOS among them when it likes."""
        checksum = (hash((*self.seen(context), params.seed, params.temperature)) & (1 << 60) - 1) >> 7
        ids = self.ids if allowed is None else allowed
        may_end = allowed is None or EOS in allowed
        if may_end and self.eos_every is not None and checksum % self.eos_every == 0:
            return EOS
        return ids[checksum // 64 % len(ids)]

    def alone(self, prompt_ids: Sequence[int], params: SamplingParams) -> list[int]:
        """All `max_tokens` ids that follow the prompt, going on after an EOS."""
        context = list(prompt_ids)
        for _ in range(params.max_tokens):
            context.append(self.next_id(context, params))
        return context[len(prompt_ids) :]

    def score(self, context: Sequence[int], token_id: int, count: int) -> TokenLogprobs:
        """What it thinks of `token_id` after `context`, out of MOST_IDS; the parameters don't matter."""
        key = hash(self.seen(context))
        figures = [-(hash((key, i)) >> 7) % (1 << 20) / -65536 - 0.5 for i in range(MOST_IDS)]
        top = sorted(range(MOST_IDS), key=lambda i: (-figures[i], i))[:count]
        rank = 1 + sum(figure > figures[token_id] for figure in figures)
        return TokenLogprobs(token_id, figures[token_id], rank, tuple(top), tuple(figures[i] for i in top))


    def hidden(self, context: Sequence[int]) -> np.ndarray:
        """Its normed hidden state [H] after `context`; whole numbers, so that sums are exact in any order."""
        key = hash(self.seen(context))
        return np.array([(hash((key, i)) >> 7) % 2001 - 1000 for i in range(HIDDEN)], np.float32)

    def embedding(self, prompt_ids: Sequence[int], pooling: Pooling) -> np.ndarray:
        """What a request for the embedding of the prompt gets."""
        ends = [len(prompt_ids)] if pooling == "last" else range(1, len(prompt_ids) + 1)
        pooled = sum(self.hidden(prompt_ids[:end]).astype(np.float64) for end in ends) / len(ends)
        return (pooled / np.sqrt((pooled**2).sum())).astype(np.float32)


@dataclass
class _Slot:
    """What the device keeps of a slot."""

    params: SamplingParams
    page_table: list[int]
    end_ids: tuple[int, ...] = ()
    context_len: int = 0
    last_id: int | None = None
    seen: list[int] | None = None  # prompt and output that its logits are shaped by, if they are

    @property
    def has_ended(self) -> bool:
        """Whether decode rows are skipped."""
        return self.last_id in self.end_ids


class FakeRunner:
    """Device stand-in whose memory is real pages of token ids.

    The next token is a checksum of the context as read *through the page table*, so a wrong page, offset,
    chunk, slot or order changes the text or trips an assertion. A launch computes at once, in order; what
    it sampled shows only in `fetch`.
    """

    def __init__(self, config: EngineConfig, model: FakeModel | None = None):
        self.config = config
        self.model = model or FakeModel()
        self.memory = [[UNWRITTEN] * config.page_size for _ in range(config.num_pages)]
        self.slots: list[_Slot | None] = [None] * config.max_num_seqs
        self.plans: list[Plan] = []
        self.most_in_flight = 0
        self.num_skipped = 0  # rows of slots that had ended
        self._scheduler: Scheduler | None = None
        self._in_flight: deque[tuple[int, tuple[StepResult, ...]]] = deque()

    def watch(self, scheduler: Scheduler) -> None:
        """From now on also catch writes to pages that somebody else, or the prefix cache, may read."""
        self._scheduler = scheduler

    def check_cache(self) -> None:
        """Assert that every page of the prefix cache holds the tokens that it promises."""
        assert self._scheduler is not None
        for entry in self._scheduler._kv.prefix.entries():
            assert tuple(self.memory[entry.page]) == entry.tokens, f"{entry} holds {self.memory[entry.page]}"

    def launch(self, plan: Plan, masks: MaskSource | None = None) -> int:
        assert plan.steps, "a plan of nothing"
        if self._scheduler is not None:
            for step in plan.steps:
                for row in step.rows:
                    self._check_written_pages(row, self._scheduler)
        handle = len(self.plans)
        self.plans.append(plan)
        self._in_flight.append((handle, tuple(self._step(step, masks) for step in plan.steps)))
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        return handle

    def fetch(self, handle: int) -> tuple[StepResult, ...]:
        expected, results = self._in_flight.popleft()
        assert handle == expected, f"launch {handle} is fetched before {expected}"
        return results

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def _step(self, step: Step, masks: MaskSource | None) -> StepResult:
        self._check_shape(step)
        slots = [self._update_slot(row) for row in step.rows]
        if step.kind == "prefill":
            return self._scored(step, slots, self._iterate(step, slots, masks))
        self.num_skipped += sum(slot.has_ended for slot in slots)
        iterations = []
        for i in range(step.iterations):
            live = [
                None if slot.has_ended or i >= row.query_len else slot
                for row, slot in zip(step.rows, slots)
            ]
            iterations.append(self._iterate(step, live, masks, i))
        return self._scored(step, slots, [token_id for ids in zip(*iterations) for token_id in ids])

    def _scored(self, step: Step, slots: Sequence[_Slot], ids: Sequence[int]) -> StepResult:
        """The result of a step, with the log-probabilities that its rows' parameters ask for."""
        logprobs: tuple[TokenLogprobs | None, ...] = ()
        prompt_logprobs: tuple[tuple[TokenLogprobs, ...], ...] = ()
        if any(row.sample and slot.params.logprobs is not None for row, slot in zip(step.rows, slots)):
            assert step.iterations == 1, "log-probabilities are of one id"
            logprobs = tuple(
                self._score(slot, row.start + row.query_len, token_id, slot.params.logprobs)
                if row.sample and token_id != GARBAGE else None
                for row, slot, token_id in zip(step.rows, slots, ids)
            )  # fmt: skip
        if any(row.targets for row in step.rows):
            prompt_logprobs = tuple(
                tuple(
                    self._checked_score(row, slot, query, target)
                    for query, target in enumerate(row.targets, row.first_target)
                )
                for row, slot in zip(step.rows, slots)
            )
        return StepResult(tuple(ids), logprobs, prompt_logprobs, self._pooled(step, slots))

    def _pooled(self, step: Step, slots: Sequence[_Slot]) -> np.ndarray | None:
        if not any(row.num_pooled for row in step.rows):
            return None
        pooled = np.zeros((len(step.rows), HIDDEN), np.float32)
        for n, (row, slot) in enumerate(zip(step.rows, slots)):
            assert 0 <= row.num_pooled <= row.query_len
            end = row.start + row.query_len
            for position in range(end - row.num_pooled, end):
                pooled[n] += self.model.hidden(self._context(slot, position + 1))
        return pooled

    def _score(self, slot: _Slot, end: int, token_id: int, count: int | None) -> TokenLogprobs | None:
        if count is None:
            return None
        return self.model.score(self._context(slot, end), token_id, count)

    def _checked_score(self, row: Row, slot: _Slot, query: int, target: int) -> TokenLogprobs:
        assert query < row.query_len, "a target without a query"
        assert row.tokens is not None
        assert target == (*row.tokens, target)[query + 1], "another token than the next"
        scored = self._score(slot, row.start + query + 1, target, slot.params.prompt_logprobs)
        assert scored is not None, "a target that nobody asked for"
        return scored

    def _iterate(
        self, step: Step, slots: Sequence[_Slot | None], masks: MaskSource | None, iteration: int = 0
    ) -> list[int]:
        """One forward pass, and an id for each row; rows without a slot are skipped."""
        self._write(step, slots, iteration)
        mask = None if masks is None else masks(step)
        assert mask is None or step.iterations == 1, "a mask is of one id"
        sampled = []
        for n, (row, slot) in enumerate(zip(step.rows, slots)):
            if slot is None or not row.sample:
                sampled.append(GARBAGE)
                if slot is not None:
                    slot.context_len = row.start + row.query_len
                continue
            slot.context_len = row.start + (row.query_len if step.kind == "prefill" else iteration + 1)
            context = self._context(slot, slot.context_len)
            assert UNWRITTEN not in context, "a position is read that nobody has written"
            assert GARBAGE not in context, "a position is read that a padding row has written"
            if slot.seen is not None:
                assert len(slot.seen) == slot.context_len, "logits would be shaped by another history"
                assert slot.seen[-len(context) :] == context, "logits would be shaped by another history"
            if mask is None or (mask[n] == -1).all():
                slot.last_id = self.model.next_id(context, slot.params)
            else:
                bits = np.unpackbits(mask[n].view(np.uint8), bitorder="little")
                slot.last_id = self.model.next_id(context, slot.params, np.nonzero(bits)[0].tolist())
            sampled.append(slot.last_id)
            if slot.seen is not None:
                slot.seen.append(slot.last_id)
        return sampled

    def _check_shape(self, step: Step) -> None:
        if step.kind == "decode":
            assert step.queries == 1
            assert step.iterations in (1, self.config.decode_steps)
            assert step.batch in self.config.decode_buckets, f"B={step.batch} is not listed"
        else:
            shape = (step.batch, step.queries)
            assert shape in self.config.prefill_buckets, f"{shape} is not listed"
            assert step.iterations == 1
        assert 0 < len(step.rows) <= step.batch
        assert len({row.slot for row in step.rows}) == len(step.rows), "a slot has two rows"
        for row in step.rows:
            assert 0 <= row.slot < self.config.max_num_seqs
            assert 0 < row.query_len <= max(step.queries, step.iterations)
            if step.kind == "decode":
                assert row.tokens is None
                assert row.sample
            else:
                assert row.tokens is not None
                assert len(row.tokens) == row.query_len

    def _update_slot(self, row: Row) -> _Slot:
        if row.params is not None:
            assert row.first_page == 0
            assert len(row.end_ids) <= MAX_END_IDS
            history = row.history
            assert (history is not None) == row.params.is_shaped
            seen = None if history is None else [*history.prompt_ids, *history.output_ids]
            self.slots[row.slot] = _Slot(row.params, [], row.end_ids, seen=seen)
        slot = self.slots[row.slot]
        assert slot is not None, f"slot {row.slot} was never given parameters"
        if row.start != slot.context_len and not slot.has_ended:  # some of it was computed for others
            assert row.start > slot.context_len, f"row starts at {row.start}, slot has {slot.context_len}"
            assert row.tokens is not None, "a decode row can't skip positions"
            assert row.start % self.config.page_size == 0, "a page would be shared in part"
        assert row.first_page <= len(slot.page_table), "the page table has a gap"
        assert all(0 < page < self.config.num_pages for page in row.new_pages), f"pages {row.new_pages}"
        for index, page in enumerate(row.new_pages, row.first_page):
            if index < len(slot.page_table) and page != slot.page_table[index]:
                replaced = self.memory[slot.page_table[index]]
                assert (index + 1) * self.config.page_size <= row.start, "a page is replaced while it fills"
                assert self.memory[page] == replaced, "a page is replaced by one with other contents"
        slot.page_table[row.first_page : row.first_page + len(row.new_pages)] = row.new_pages
        window, page_size = self.model.window, self.config.page_size
        first = 0 if window is None else max(0, row.start + 1 - window) // page_size
        seen = slot.page_table[first:]  # what it had before may have been given to anybody, itself included
        assert len(set(seen)) == len(seen), "a page stands twice in one page table"
        end = row.start + row.query_len
        assert end <= self.config.max_model_len
        assert end <= len(slot.page_table) * self.config.page_size, "positions without a page"
        assert len(slot.page_table) <= self.config.pages_per_seq
        return slot

    def _check_written_pages(self, row: Row, scheduler: Scheduler) -> None:
        """Called before the scheduler takes the pages: a new one is nobody's yet."""
        kv, page_size = scheduler._kv, self.config.page_size
        seq = scheduler._slots[row.slot]
        assert seq is not None, f"slot {row.slot} has no sequence"
        for index in range(row.start // page_size, (row.start + row.query_len - 1) // page_size + 1):
            if index * page_size >= row.start:
                page = row.new_pages[index - row.first_page]
                assert not kv.pool.num_holders(page), f"page {page} is given away while somebody holds it"
            else:
                page = seq.pages[index]
                assert kv.pool.num_holders(page) == 1, f"page {page} is written while others hold it"
                assert page not in kv.prefix, f"page {page} is written while it is in the prefix cache"

    def _write(self, step: Step, slots: Sequence[_Slot | None], iteration: int) -> None:
        page_size = self.config.page_size
        writers: dict[int, int] = {}
        for row, slot in zip(step.rows, slots):
            if slot is None:
                continue
            tokens = row.tokens
            if tokens is None:
                assert slot.last_id is not None, "decode before anything was sampled"
                tokens = (slot.last_id,)
            for position, token in enumerate(tokens, row.start + iteration):
                page = slot.page_table[position // page_size]
                assert writers.setdefault(page, row.slot) == row.slot, f"two rows write page {page}"
                self.memory[page][position % page_size] = token
        if len(step.rows) < step.batch or None in slots:
            self.memory[0] = [GARBAGE] * page_size

    def _context(self, slot: _Slot, end: int) -> list[int]:
        """What a query at position `end` - 1 sees."""
        first = 0 if self.model.window is None else max(0, end - self.model.window)
        return [self._read(slot, position) for position in range(first, end)]

    def _read(self, slot: _Slot, position: int) -> int:
        page_size = self.config.page_size
        return self.memory[slot.page_table[position // page_size]][position % page_size]
