"""Who runs in the next step, and on which pages."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.kv_pages import KVPages
from jaxserve.engine.packing import pack
from jaxserve.engine.plan import Plan, Row, Step, StepResult
from jaxserve.engine.sequence import Sequence, SequenceState
from jaxserve.types import Request


class Scheduler:
    """Owns sequences, slots and pages. A turn calls, in this order:

        admit(now)              waiting sequences get slots, first come, first served
        plan = schedule()       decides, changes nothing
        commit(plan)            the plan is launched: pages are taken, positions advance
        apply(results, now)     ids of the oldest plan committed and not applied come back

    A turn is one step. Prefill and decode alternate while there is work for both, so a long prompt never
    holds running streams up for more than one chunk, and the first token of a prompt is read while the
    decode step behind it runs.

    The lag. Plan n+1 is committed before the ids of plan n are applied. That works because a plan needs
    positions, never ids: the last id of a slot stays on the device. An end by length is known when
    scheduling, so max_tokens is never overshot. An end by id, text or abort comes to light one plan late:
    `finish` frees slot and pages at once, though the plan in flight still has a row of that sequence.
    This is safe because the device runs steps in the order of launching. The stale row writes its KV
    before any later plan, and only a later plan can give its page or slot to somebody else, whose own
    rows write every position before reading it and, by their first row, replace the slot's state. Only
    the stale row's id has to be dropped, which `apply` does.

    Admission reserves pages by count for the longest output the request may have, and takes them one by
    one as positions are reached. So decode can't run out.
    """

    def __init__(self, config: EngineConfig):
        self._config = config
        self._kv = KVPages(config)
        self._free_slots = list(reversed(range(config.max_num_seqs)))  # the lowest is on top
        self._slots: list[Sequence | None] = [None] * config.max_num_seqs
        # Keyed for removal in constant time; all three in order of arrival at that stage.
        self._waiting: OrderedDict[str, Sequence] = OrderedDict()
        self._prefilling: dict[int, Sequence] = {}  # by slot
        self._decoding: dict[int, Sequence] = {}  # by slot
        self._ending: set[Sequence] = set()  # no slot any more, but pages, until their last ids are known
        self._in_flight: deque[tuple[Plan, list[Sequence]]] = deque()  # and the sequence of each row
        self._last_kind = "decode"

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_free_slots(self) -> int:
        return len(self._free_slots)

    @property
    def num_pages_used(self) -> int:
        return self._kv.num_used

    @property
    def num_pages_cached(self) -> int:
        return self._kv.pool.num_cached

    @property
    def num_pages_total(self) -> int:
        return self._kv.pool.num_total

    @property
    def num_queried_tokens(self) -> int:
        """Prompt tokens of all sequences that began."""
        return self._kv.num_queried_tokens

    @property
    def num_hit_tokens(self) -> int:
        """Those of them that the prefix cache gave."""
        return self._kv.num_hit_tokens

    @property
    def has_work(self) -> bool:
        """Whether a sequence still has steps to launch."""
        return bool(self._waiting or self._prefilling or self._decoding)

    def add(self, request: Request) -> Sequence:
        """Put a valid request, with an id of its own, at the end of the line."""
        assert request.request_id not in self._waiting, f"{request.request_id} waits already"
        # The last token is sampled but never fed, so it has no cache position.
        most_cached = len(request.prompt_ids) + request.params.max_tokens - 1
        seq = Sequence(request, self._config.pages_for(most_cached))
        assert seq.most_pages <= self._config.pages_per_seq, f"{seq} is over max_model_len"
        self._waiting[request.request_id] = seq
        return seq

    def admit(self, now: float) -> None:
        """Move sequences from the head of the line into slots while slots and pages last."""
        for seq in self._prefilling.values():
            self._kv.adopt(seq)  # others may have computed what comes next
        while self._waiting and self._free_slots:
            seq = next(iter(self._waiting.values()))
            if not self._kv.can_reserve(seq):
                break  # those behind it wait as well: a big request is not overtaken for ever
            del self._waiting[seq.request.request_id]
            seq.slot = self._free_slots.pop()
            seq.state = SequenceState.PREFILL
            seq.admitted_s = now
            self._slots[seq.slot] = seq
            self._prefilling[seq.slot] = seq
            self._kv.begin(seq)

    def schedule(self) -> Plan | None:
        """Decide the next step; None when nothing can be launched. Changes nothing."""
        if self._prefilling and (self._last_kind == "decode" or not self._decoding):
            return Plan((self._prefill_step(),))
        if self._decoding:
            return Plan((self._decode_step(),))
        return None

    def commit(self, plan: Plan) -> None:
        """Take note that `plan`, the result of the last `schedule`, is launched."""
        seqs = []
        for step in plan.steps:
            self._last_kind = step.kind
            for row in step.rows:
                seq = self._slots[row.slot]
                assert seq is not None, f"slot {row.slot} has no sequence"
                self._kv.take_for(seq, row)
                seqs.append(seq)
        owners = iter(seqs)
        for step in plan.steps:
            for row, seq in zip(step.rows, owners):
                self._kv.settle(seq, row)
                if not row.sample:
                    continue
                seq.num_launched_outputs += 1
                if seq.num_launched_outputs == seq.request.params.max_tokens:
                    self._release(seq, SequenceState.ENDING)
                elif seq.state is SequenceState.PREFILL:
                    seq.state = SequenceState.DECODE
                    del self._prefilling[row.slot]
                    self._decoding[row.slot] = seq
        self._in_flight.append((plan, seqs))

    def apply(self, results: tuple[StepResult, ...], now: float) -> list[tuple[Sequence, int]]:
        """Take in the ids of the oldest plan in flight; return those that still matter, with their owner."""
        plan, seqs = self._in_flight.popleft()
        assert len(results) == len(plan.steps), f"{len(results)} results for {len(plan.steps)} steps"
        sampled = []
        owners = iter(seqs)
        for step, result in zip(plan.steps, results):
            assert len(result.token_ids) == len(step.rows), (
                f"{len(result.token_ids)} ids for {len(step.rows)} rows of a {step.kind} step"
            )
            for row, token_id, seq in zip(step.rows, result.token_ids, owners):
                if row.sample and seq.state is not SequenceState.FINISHED:
                    if seq.first_token_s is None:
                        seq.first_token_s = now
                    seq.last_token_s = now
                    seq.output_ids.append(token_id)
                    if seq.register_at <= seq.num_prompt + len(seq.output_ids):
                        self._kv.register(seq)
                    sampled.append((seq, token_id))
        return sampled

    def finish(self, seq: Sequence) -> None:
        """End a sequence in whatever state it is; slot and pages are free from here on."""
        if seq.state is SequenceState.WAITING:
            del self._waiting[seq.request.request_id]
            seq.state = SequenceState.FINISHED
        else:
            self._release(seq, SequenceState.FINISHED)

    def check(self) -> None:
        """Assert the invariants between turns: no page is lost, no slot is without a sequence."""
        live = [seq for seq in self._slots if seq is not None]
        holders = [*live, *self._ending]
        self._kv.check(holders)
        assert sorted([*self._free_slots, *(seq.slot for seq in live if seq.slot is not None)]) == list(
            range(self._config.max_num_seqs)
        )
        assert self._prefilling.keys() | self._decoding.keys() == {seq.slot for seq in live}
        for seq in self._ending:
            assert seq.state is SequenceState.ENDING
            assert seq.slot is None
        for slot, seq in [*self._prefilling.items(), *self._decoding.items()]:
            assert self._slots[slot] is seq
            assert seq.slot == slot
            num_pages = len(seq.pages)
            assert num_pages == self._config.pages_for(seq.num_cached)
            assert num_pages <= seq.most_pages
            assert (seq.num_cached < seq.num_to_prefill) == (seq.state is SequenceState.PREFILL)

    def _prefill_step(self) -> Step:
        max_chunk = self._config.max_chunk
        candidates = list(self._prefilling.values())
        chunks = [min(seq.num_to_prefill - seq.num_cached, max_chunk) for seq in candidates]
        (batch, queries), chosen = pack(chunks, self._config)
        free = self._kv.pool.preview()
        rows = tuple(self._prefill_row(candidates[i], chunks[i], free) for i in chosen)
        return Step("prefill", batch, queries, rows)

    def _prefill_row(self, seq: Sequence, chunk: int, free: Iterator[int]) -> Row:
        start, end = seq.num_cached, seq.num_cached + chunk
        assert seq.slot is not None
        first_page, new_pages = self._kv.prefill_pages(seq, end, free)
        return Row(
            slot=seq.slot,
            start=start,
            query_len=chunk,
            tokens=seq.tokens(start, end),
            first_page=first_page,
            new_pages=new_pages,
            sample=end == seq.num_to_prefill,
            params=None if seq.num_told_pages else seq.request.params,
        )

    def _decode_step(self) -> Step:
        page_size = self._config.page_size
        free = self._kv.pool.preview()
        rows = []
        for slot, seq in self._decoding.items():
            num_pages = len(seq.pages)
            first_page: int = num_pages
            new_pages: tuple[int, ...] = ()
            if seq.remaps or seq.num_cached == num_pages * page_size:
                first_page, new_pages = self._kv.decode_pages(seq, free)
            rows.append(Row(slot, seq.num_cached, 1, None, first_page, new_pages, True, None))
        return Step("decode", self._config.decode_bucket(len(rows)), 1, tuple(rows))

    def _release(self, seq: Sequence, state: SequenceState) -> None:
        """Give slot and pages back, if it still has them.

        One that ends by length keeps its pages until its last ids are known if these complete a page,
        which happens once in `page_size` times.
        """
        seq.state = state
        is_holder = seq.slot is not None or seq in self._ending
        if seq.slot is not None:
            self._prefilling.pop(seq.slot, None)
            self._decoding.pop(seq.slot, None)
            self._slots[seq.slot] = None
            self._free_slots.append(seq.slot)
            seq.slot = None
        if state is SequenceState.ENDING and self._kv.awaits_ids(seq):
            self._ending.add(seq)
        elif is_holder:
            self._ending.discard(seq)
            self._kv.release(seq)
