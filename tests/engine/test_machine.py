"""The engine under random lives, and the same lives on engines that are broken on purpose."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis.errors import HypothesisException
from hypothesis.stateful import run_state_machine_as_test

from jaxserve.engine import prefix
from jaxserve.engine.engine import Engine
from jaxserve.engine.kv_pages import NEVER, KVPages
from jaxserve.engine.pages import PageAllocator
from jaxserve.engine.scheduler import Scheduler
from jaxserve.engine.sequence import SequenceState
from jaxserve.engine.steps import StepPlanner
from tests.engine.machine import EngineMachine

LIVES = settings(
    max_examples=100, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
# Enough to meet every planted bug, and always the same.
HUNT = settings(LIVES, max_examples=300, derandomize=True, database=None, phases=[Phase.generate])


def test_whatever_happens_answers_are_as_if_alone_and_no_page_is_lost():
    turns = 0

    class Counting(EngineMachine):
        def teardown(self):
            nonlocal turns
            super().teardown()
            turns += len(self.served.runner.plans)

    run_state_machine_as_test(Counting, settings=LIVES)
    assert turns > 2000


def free_shared_page(monkeypatch):
    """A page is given away when the first of its holders has done with it."""

    def free(self, pages):
        for page in pages:
            if self._refs[page]:
                self._refs[page] = 0
                (self._cached.__setitem__(page, None) if page in self._kept else self._free.append(page))

    monkeypatch.setattr(PageAllocator, "free", free)


def skip_token_comparison(monkeypatch):
    """The hash is believed."""
    weaken_hash(monkeypatch)
    monkeypatch.setattr(prefix, "same_page", lambda entry, parent, salt, tokens: True)


def weaken_hash(monkeypatch):
    real = prefix.page_key
    monkeypatch.setattr(prefix, "page_key", lambda before, tokens: real(before, tokens) % 16)


def register_one_token_early(monkeypatch):
    """A page is shared before its last position is written."""
    take_for = KVPages.take_for

    def early(self, seq, row):
        take_for(self, seq, row)
        if seq.chain is not None and seq.register_at == seq.num_cached + 1 <= seq.num_prompt:
            seq.num_cached += 1
            self.register(seq)
            seq.num_cached -= 1

    monkeypatch.setattr(KVPages, "take_for", early)


def forget_an_abort_of_the_preempted(monkeypatch):
    """One that is aborted while it is preempted stays in line."""
    finish = Scheduler.finish

    def forgetful(self, seq):
        if seq.state is SequenceState.PREEMPTED:
            seq.state = SequenceState.FINISHED
        else:
            finish(self, seq)

    monkeypatch.setattr(Scheduler, "finish", forgetful)


def evict_page_in_use(monkeypatch):
    """The cache gives up what it has had longest, used or not."""

    def used(self):
        return [page for page in self._kept if self._refs[page]]

    def evict(self):
        page = next(chain(used(self), self._cached))
        self._cached.pop(page, None)
        self._kept.discard(page)
        self._evicted(page)
        return page

    monkeypatch.setattr(PageAllocator, "preview", lambda self: chain(self._free, used(self), self._cached))
    monkeypatch.setattr(PageAllocator, "_evict", evict)


def free_duplicates_at_once(monkeypatch):
    """The duplicate of a page goes before the device is told of the other one."""
    register = KVPages.register

    def hasty(self, seq):
        register(self, seq)
        for index, page in seq.remaps:
            self.pool.free((seq.pages[index],))
            seq.pages[index] = page
            self.num_reserved -= 1
        seq.remaps = []

    monkeypatch.setattr(KVPages, "register", hasty)


def keep_surplus_ids(monkeypatch):
    """What a launch of several steps sampled behind the end of a sequence counts as well."""
    apply, answer = Scheduler.apply, Engine._answer

    def told(self, sampled, now):
        answer(self, ((seq, i) for seq, i in sampled if seq.request.request_id in self._live), now)

    monkeypatch.setattr(Scheduler, "apply", lambda self, results, now: list(apply(self, results, now)))
    monkeypatch.setattr(Engine, "_answer", told)


def take_the_pages_of_one_step(monkeypatch):
    """A launch of several steps gets pages for the first of them."""
    several = StepPlanner._several

    def meagre(self, decoding):
        step = several(self, decoding)
        if step is None:
            return None
        return replace(step, rows=tuple(row._replace(new_pages=row.new_pages[:1]) for row in step.rows))

    monkeypatch.setattr(StepPlanner, "_several", meagre)


def slide_a_page_too_early(monkeypatch):
    """A page goes while the next query still sees its last position."""
    slide_next = KVPages._slide_next

    def early(self, seq):
        slide_next(self, seq)
        seq.slide_at -= 1

    def slide(self, seq):
        self._window -= 1
        try:
            real(self, seq)
        finally:
            self._window += 1

    real = KVPages.slide
    monkeypatch.setattr(KVPages, "_slide_next", early)
    monkeypatch.setattr(KVPages, "slide", slide)


def slide_what_is_not_registered(monkeypatch):
    """A page goes before its tokens are known, and is put into the cache when they are."""
    real = KVPages.slide

    def slide(self, seq):
        register_at, seq.register_at = seq.register_at, NEVER
        real(self, seq)
        seq.register_at = register_at

    monkeypatch.setattr(KVPages, "slide", slide)


BUGS = [
    free_shared_page, skip_token_comparison, register_one_token_early, forget_an_abort_of_the_preempted,
    evict_page_in_use, free_duplicates_at_once, keep_surplus_ids, take_the_pages_of_one_step,
    slide_a_page_too_early, slide_what_is_not_registered,
]  # fmt: skip


@pytest.mark.parametrize("bug", BUGS)
@pytest.mark.parametrize("checks", [True, False])
def test_a_planted_bug_is_caught(bug, checks, monkeypatch, caplog):
    """By the invariants at the next turn, and, without them, by what the device sees or answers."""
    if not checks:
        monkeypatch.setattr(Scheduler, "check", lambda self: None)
    caplog.set_level("CRITICAL")
    bug(monkeypatch)
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever gives it away
        run_state_machine_as_test(EngineMachine, settings=HUNT)
    assert not isinstance(caught.value, HypothesisException), caught.value


def test_a_weak_hash_alone_changes_nothing(monkeypatch):
    weaken_hash(monkeypatch)
    run_state_machine_as_test(EngineMachine, settings=settings(LIVES, max_examples=30))
