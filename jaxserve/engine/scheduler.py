"""Who runs in the next step, and on which pages."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import batched, chain, islice

from jaxserve.engine.admission import Admission
from jaxserve.engine.config import EngineConfig
from jaxserve.engine.kv_pages import KVPages
from jaxserve.engine.plan import Plan, Row, Step, StepResult
from jaxserve.engine.queue import WaitingQueue, rank
from jaxserve.engine.sequence import Rank, Sequence, SequenceState, rank_of
from jaxserve.engine.steps import StepPlanner
from jaxserve.types import Request, WaitReason


class Scheduler:
    """Owns sequences, slots and pages. A turn calls, in this order:

        admit(now)              who lacks pages takes them from others; who waits gets a slot
        plan = schedule()       decides, changes nothing
        commit(plan)            the plan is launched: pages are taken, positions advance
        apply(results, now)     ids of the oldest plan committed and not applied come back

    A turn is one launch. Prefill and decode alternate while there is work for both, so a long prompt never
    holds running streams up for more than one chunk, and the first token of a prompt is read while the
    decode step behind it runs.

    The lag. Plan n+1 is committed before the ids of plan n are applied. That works because a plan needs
    positions, never ids: the last id of a slot stays on the device. An end by length is known when
    scheduling, so max_tokens is never overshot. An end by id, text or abort comes to light one plan late:
    `finish` frees slot and pages at once, though the plan in flight still has a row of that sequence.
    This is safe because the device runs steps in the order of launching. The stale row writes its KV
    before any later plan, and only a later plan can give its page or slot to somebody else, whose own
    rows write every position before reading it and, by their first row, replace the slot's state. Only
    the stale row's id has to be dropped, which `apply` does. After an end by id the device, which knows the
    ids that end a sequence, skips the stale row by itself.

    Pages are taken one by one as positions are reached. Unless all of them were reserved on admission,
    they can run out. Then sequences are preempted: they lose slot and pages, wait in the place in line
    that they had, and are computed again from their tokens, which are the same, so their output is too. The
    first in line of those who run is spared, so somebody always gets on. Of the others the one of lowest
    priority goes, and of these the one with least to compute again. A deterministic engine computes the
    prompt again in the chunks of the first time and the answer token by token, as then, for the KV of a
    decode step has other bits than that of a prefill; ids that come back a second time are not told again.
    """

    def __init__(self, config: EngineConfig, eos_ids: frozenset[int] = frozenset()):
        self._config = config
        self._kv = KVPages(config)
        self._planner = StepPlanner(config, self._kv, eos_ids)
        self._most_chunk_pages = config.pages_for(config.max_chunk) + 1
        self._free_slots = list(reversed(range(config.max_num_seqs)))  # the lowest is on top
        self._slots: list[Sequence | None] = [None] * config.max_num_seqs
        self._admission = Admission(config, self._kv)
        self._waiting = WaitingQueue()
        self._num_added = 0
        self._prefilling: dict[int, Sequence] = {}  # by slot
        self._decoding: dict[int, Sequence] = {}  # by slot
        self._ending: set[Sequence] = set()  # no slot any more, but pages, until their last ids are known
        self._in_flight: deque[tuple[Plan, list[Sequence]]] = deque()  # and the sequence of each row
        self._last_kind = "decode"
        self.num_preemptions = 0
        self.wait_reason: WaitReason | None = None  # what the first in line waits for

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_queued_tokens(self) -> int:
        """Prompt tokens of those who wait."""
        return self._waiting.num_tokens

    @property
    def mean_output(self) -> float:
        """Tokens that a request generated lately."""
        return self._admission.mean_output

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
        """Put a valid request, with an id of its own, in line."""
        # The last token is sampled but never fed, so it has no cache position.
        most_cached = len(request.prompt_ids) + max(1, request.params.max_tokens) - 1
        place = rank(request, self._num_added, self._config.scheduling_policy)
        end_ids = self._planner.end_ids(request.params)
        pooling = self._config.pooling if request.embeds else None
        num_pages = self._config.pages_for(most_cached)
        assert num_pages <= self._config.pages_per_seq, f"request {request.request_id} is over max_model_len"
        seq = Sequence(request, min(num_pages, self._config.most_pages), place, end_ids, pooling)
        self._num_added += 1
        self._waiting.add(seq)
        return seq

    def admit(self, now: float) -> None:
        """Settle who holds slots and pages: hits first, then those who run, then those who wait."""
        for seq in self._prefilling.values():
            self._kv.adopt(seq)  # others may have computed what comes next
        if self._config.admission == "optimistic":
            self._make_room()
        self.wait_reason = None
        while self._waiting:
            seq = self._waiting.head
            # Those behind wait as well: a big request is not overtaken for ever.
            if not self._free_slots:
                self.wait_reason = "slots"
                break
            if seq.num_launched_outputs > seq.num_read_outputs:
                break  # preempted a moment ago: the ids it goes on from are still on the device
            if not self._admission.admits(seq, self._running()):
                self.wait_reason = "pages"
                break
            self._waiting.remove(seq)
            seq.slot = self._free_slots.pop()
            seq.state = SequenceState.PREFILL
            if seq.admitted_s is None:
                seq.admitted_s = now
            if self._config.deterministic:
                seq.replay()
            seq.num_to_prefill = seq.num_prompt + seq.num_launched_outputs
            self._slots[seq.slot] = seq
            self._prefilling[seq.slot] = seq
            self._kv.begin(seq)

    def preempt(self, seq: Sequence) -> None:
        """Take slot and pages from a running sequence and put it back in line."""
        self._leave_slot(seq)
        self._kv.release(seq)
        seq.state = SequenceState.PREEMPTED
        self._waiting.add(seq)
        self.num_preemptions += 1

    def schedule(self) -> Plan | None:
        """Decide the next step; None when nothing can be launched. Changes nothing."""
        prefill_first = self._last_kind == "decode" or not self._decoding
        others_wait = bool(self._waiting or self._prefilling)
        for is_prefill in (prefill_first, not prefill_first):
            if is_prefill:
                step = self._planner.prefill(self._prefilling, self._decoding)
            else:
                step = self._planner.decode(self._decoding, others_wait=others_wait)
            if step is not None:
                return Plan((step,))
        return None

    def owner(self, slot: int) -> Sequence:
        """Whose slot it is."""
        seq = self._slots[slot]
        assert seq is not None, f"slot {slot} has no sequence"
        return seq

    def peek(self, fetched: Iterable[tuple[StepResult, ...]]) -> dict[Sequence, list[int]]:
        """What `apply` would add to the `output_ids` of sequences with a grammar, were it given these results
        one by one. Changes nothing."""
        added: dict[Sequence, list[int]] = {}
        num_read: dict[Sequence, int] = {}
        for (plan, seqs), results in zip(self._in_flight, fetched):
            owners = iter(seqs)
            for step, result in zip(plan.steps, results):
                for row, ids, seq in zip(step.rows, batched(result.token_ids, step.iterations), owners):
                    if not row.sample or seq.request.grammar is None or seq.state is SequenceState.FINISHED:
                        continue
                    num_read[seq] = num_read.get(seq, seq.num_read_outputs) + 1
                    if num_read[seq] > len(seq.output_ids):
                        added.setdefault(seq, []).append(ids[0])
        return added

    def commit(self, plan: Plan) -> None:
        """Take note that `plan`, the result of the last `schedule`, is launched."""
        seqs = []
        for step in plan.steps:
            self._last_kind = step.kind
            for row in step.rows:
                seq = self._slots[row.slot]
                assert seq is not None, f"slot {row.slot} has no sequence"
                if row.tokens is None and not row.new_pages:  # most rows, in few instructions
                    seq.num_cached += row.query_len
                else:
                    self._kv.take_for(seq, row)
                    if row.targets:
                        seq.num_scored = row.start + row.first_target + len(row.targets)
                    if row.num_pooled:
                        seq.num_pooled = row.start + row.query_len
                seqs.append(seq)
        owners = iter(seqs)
        for step in plan.steps:
            for row, seq in zip(step.rows, owners):
                if seq.remaps or seq.register_at <= seq.num_cached:
                    self._kv.settle(seq, row)
                if seq.slide_at <= seq.num_cached:
                    self._kv.slide(seq)
                if not row.sample:
                    continue
                seq.num_launched_outputs += row.query_len if row.tokens is None else 1
                if seq.num_launched_outputs == seq.max_outputs:
                    self._release(seq, SequenceState.ENDING)
                elif seq.state is SequenceState.PREFILL:
                    seq.state = SequenceState.DECODE
                    del self._prefilling[row.slot]
                    self._decoding[row.slot] = seq
        self._in_flight.append((plan, seqs))

    def apply(self, results: tuple[StepResult, ...], now: float) -> Iterator[tuple[Sequence, int]]:
        """Take in the ids of the oldest plan in flight; yield those that still matter, with their owner.

        After each the caller may `finish` the owner: then what the same launch sampled behind it is dropped.
        """
        plan, seqs = self._in_flight.popleft()
        assert len(results) == len(plan.steps), f"{len(results)} results for {len(plan.steps)} steps"
        owners = iter(seqs)
        for step, result in zip(plan.steps, results):
            assert len(result.token_ids) == len(step.rows) * step.iterations, (
                f"{len(result.token_ids)} ids for {len(step.rows)} rows of a {step.kind} step"
            )
            row_owners = list(islice(owners, len(step.rows)))
            if step.kind == "prefill":
                _take_figures(step.rows, row_owners, result)
            if result.logprobs:
                for seq, one in zip(row_owners, result.logprobs):
                    seq.last_logprobs = one
            for seq, token_id in _sampled(step, row_owners, result):
                if seq.state is SequenceState.FINISHED:
                    continue
                seq.num_read_outputs = num_read = seq.num_read_outputs + 1
                output_ids = seq.output_ids
                if num_read <= len(output_ids):  # a replay: it is known, and told
                    if token_id != output_ids[num_read - 1]:
                        seq.has_diverged = True
                        yield seq, token_id
                    continue
                if seq.first_token_s is None:
                    seq.first_token_s = now
                seq.last_token_s = now
                output_ids.append(token_id)
                num_known = seq.num_prompt + num_read
                if seq.register_at <= num_known and token_id not in seq.end_ids:  # which isn't written
                    self._kv.register(seq)
                yield seq, token_id

    def finish(self, seq: Sequence) -> None:
        """End a sequence in whatever state it is; slot and pages are free from here on."""
        if seq.state in (SequenceState.WAITING, SequenceState.PREEMPTED):
            self._waiting.remove(seq)
            seq.state = SequenceState.FINISHED
        else:
            self._release(seq, SequenceState.FINISHED)

    def observe_output(self, num_outputs: int) -> None:
        """Note the length of an answer that ended by itself: admission counts on the next being like it."""
        self._admission.observe(num_outputs)

    def idle_fault(self) -> str | None:
        """What should not be when nothing runs, waits or is in flight; None if all is well. Costs little."""
        num_total = self._kv.pool.num_total
        if self.has_work or self._in_flight:
            return "nobody is left, but the scheduler has work"
        if len(self._free_slots) != self._config.max_num_seqs:
            return f"only {len(self._free_slots)} of {self._config.max_num_seqs} slots are free"
        if self._kv.pool.num_free != num_total:
            return f"only {self._kv.pool.num_free} of {num_total} pages are free"
        if self._ending or self._kv.num_reserved or self._waiting.num_tokens:
            return f"{self._kv.num_reserved} pages are held back for nobody"
        return None

    def check(self) -> None:
        """Assert the invariants between turns: no page is lost, no slot is without a sequence."""
        live = [seq for seq in self._slots if seq is not None]
        holders = [*live, *self._ending]
        self._kv.check(holders)
        assert sorted([*self._free_slots, *(seq.slot for seq in live if seq.slot is not None)]) == list(
            range(self._config.max_num_seqs)
        )
        assert self._prefilling.keys() | self._decoding.keys() == {seq.slot for seq in live}
        assert len(live) == len(self._prefilling) + len(self._decoding)
        assert [seq.rank for seq in self._waiting] == sorted(seq.rank for seq in self._waiting)
        assert self._waiting.num_tokens == sum(seq.num_prompt for seq in self._waiting)
        for seq in self._waiting:
            assert seq.state in (SequenceState.WAITING, SequenceState.PREEMPTED)
            assert seq.slot is None
            assert not seq.pages
        for seq in self._ending:
            assert seq.state is SequenceState.ENDING
            assert seq.slot is None
        for slot, seq in [*self._prefilling.items(), *self._decoding.items()]:
            assert self._slots[slot] is seq
            assert seq.slot == slot
            num_pages = len(seq.pages)
            assert num_pages == self._config.pages_for(seq.num_cached)
            assert num_pages - seq.num_slid <= seq.most_pages, f"{seq} holds {num_pages - seq.num_slid} pages"
            assert (seq.num_cached < seq.num_to_prefill) == (seq.state is SequenceState.PREFILL)

    def _running(self) -> Iterator[Sequence]:
        return chain(self._prefilling.values(), self._decoding.values())

    def _make_room(self) -> None:
        """Preempt until the next decode step has its pages, and the first in line its next chunk's."""
        free = self._kv.pool
        if free.num_free >= len(self._decoding) + self._most_chunk_pages:
            return
        while self._planner.num_decode_pages(self._decoding) > free.num_free and self._preempt_one():
            pass
        while self._prefilling:
            first = min(self._prefilling.values(), key=rank_of)
            if self._decoding and min(seq.rank for seq in self._decoding.values()) < first.rank:
                break  # it can wait for pages of those who decode
            need = self._planner.num_decode_pages(self._decoding) + self._planner.num_chunk_pages(first)
            if need <= free.num_free or not self._preempt_one():
                break

    def _preempt_one(self) -> bool:
        """Preempt whoever loses least; False when there is nobody to be preempted."""
        running = sorted(self._running(), key=rank_of)
        if len(running) > 1:
            priority = self._config.scheduling_policy == "priority"
            self.preempt(max(running[1:], key=lambda seq: _expendability(seq, priority)))
            return True
        # Alone it has room, unless it holds duplicates, and these come from registering what others did too.
        if running and running[0].remaps:
            running[0].registers = False
            self.preempt(running[0])
            return True
        return False

    def _leave_slot(self, seq: Sequence) -> None:
        assert seq.slot is not None, f"{seq} has no slot"
        self._prefilling.pop(seq.slot, None)
        self._decoding.pop(seq.slot, None)
        self._slots[seq.slot] = None
        self._free_slots.append(seq.slot)
        seq.slot = None

    def _release(self, seq: Sequence, state: SequenceState) -> None:
        """Give slot and pages back, if it still has them.

        One that ends by length keeps its pages until its last ids are known if these complete a page,
        which happens once in `page_size` times.
        """
        seq.state = state
        is_holder = seq.slot is not None or seq in self._ending
        if seq.slot is not None:
            self._leave_slot(seq)
        if state is SequenceState.ENDING and self._kv.awaits_ids(seq):
            self._ending.add(seq)
        elif is_holder:
            self._ending.discard(seq)
            self._kv.release(seq)


def _take_figures(rows: Iterable[Row], owners: Iterable[Sequence], result: StepResult) -> None:
    """Take in what a prefill step tells of its prompts."""
    for n, (row, seq) in enumerate(zip(rows, owners)):
        if row.targets:
            seq.prompt_logprobs.extend(result.prompt_logprobs[n])
        if row.num_pooled:
            assert result.pooled is not None, "a step that pools brought nothing"
            seq.add_pooled(result.pooled[n])


def _sampled(
    step: Step, owners: Iterable[Sequence], result: StepResult
) -> Iterable[tuple[Sequence, int]]:
    """The ids that mean something, in order, with the owners of their rows."""
    if step.kind == "prefill":
        return [(seq, id_) for row, seq, id_ in zip(step.rows, owners, result.token_ids) if row.sample]
    if step.iterations == 1:
        return zip(owners, result.token_ids)
    by_row = zip(step.rows, owners, batched(result.token_ids, step.iterations))
    return [(seq, token_id) for row, seq, ids in by_row for token_id in ids[: row.query_len]]


def _expendability(seq: Sequence, by_priority: bool) -> tuple[int, int, Rank]:
    """Lowest priority, then least to compute again, then last in line."""
    return seq.request.priority if by_priority else 0, -seq.num_cached, seq.rank
