"""Who holds which page of the pool, turn by turn, drawn from a real engine on a fake device.

`python -m tests.engine.page_map` prints the map that docs/architecture.md shows.
"""

from __future__ import annotations

from jaxserve.engine.config import EngineConfig
from jaxserve.engine.sequence import Sequence, SequenceState
from jaxserve.types import Request, SamplingParams
from tests.engine.test_serving import Served
from tests.fakes import FakeModel

CONFIG = EngineConfig(
    max_model_len=24, page_size=4, num_pages=10, max_num_seqs=3, max_prefill_tokens=16, min_prefill_queries=4
)
SYSTEM = tuple(range(10, 18))  # two pages
REQUESTS = {  # name: (turn before which it comes, prompt, max_tokens)
    "A": (1, (*SYSTEM, 20, 21), 11),
    "B": (3, (*SYSTEM, 30, 31, 32), 9),
    "C": (4, (40, 41, 42, 43), 9),
    "D": (18, tuple(range(60, 74)), 2),
}
FREE, CACHED = ".", "~"


Held = dict[str, tuple[SequenceState, list[int]]]  # state and pages, by name


def draw() -> str:
    """A column for each turn, with the pages as they are at its end; then what changed and when."""
    served = Served(CONFIG, FakeModel(), expected_output=4.0)
    kv = served.scheduler._kv
    columns: list[list[str]] = []
    notes: list[str] = []
    evicted: list[int] = []

    def forget(page: int) -> None:
        evicted.append(page)
        kv.prefix.forget(page)

    kv.pool._evicted = forget
    last = max(turn for turn, *_ in REQUESTS.values())
    for turn in range(1, 100):
        for name, (at, prompt, max_tokens) in REQUESTS.items():
            if at == turn:
                params = SamplingParams(max_tokens, temperature=0, ignore_eos=True)
                served.engine.submit(Request(name, prompt, params, 0.0))
        evicted.clear()
        before, kept, num_plans = _held(served), set(kv.pool.kept), len(served.runner.plans)
        if not served.turn() and turn > last:
            break
        after = _held(served)
        kinds = [plan.steps[0].kind[0].upper() for plan in served.runner.plans[num_plans:]]
        cells = [_cell(page, after, cached=page in kv.pool._cached) for page in range(1, CONFIG.num_pages)]
        columns.append([*(kinds or ["-"]), *cells])
        if events := [*_changes(before, after, kept - set(evicted)), *_list("evicted:", evicted)]:
            notes.append(f"{turn:4}   {'; '.join(events)}")
    names = ["turn", "step", *(f"page {page}" for page in range(1, CONFIG.num_pages))]
    rows = zip(names, *([str(number), *column] for number, column in enumerate(columns, 1)))
    lines = [f"{name:7}" + "".join(f"{cell:3}" for cell in cells).rstrip() for name, *cells in rows]
    return "\n".join([*lines, "", *notes])


def _held(served: Served) -> Held:
    """Of all that have a slot, wait for their last ids, or wait in line."""
    scheduler = served.scheduler
    seqs: list[Sequence] = [*filter(None, scheduler._slots), *scheduler._ending, *scheduler._waiting]
    return {seq.request.request_id: (seq.state, list(seq.pages)) for seq in seqs}


def _cell(page: int, held: Held, *, cached: bool) -> str:
    names = "".join(name for name, (_, pages) in sorted(held.items()) if page in pages)
    return names or (CACHED if cached else FREE)


def _changes(before: Held, after: Held, known: set[int]) -> list[str]:
    """What became of each request; pages in `known` were in the prefix cache when the turn began."""
    lost, gained = [], []
    for name in sorted(before.keys() | after.keys()):
        _, old = before.get(name, (None, []))
        state, pages = after.get(name, (None, []))
        new = [page for page in pages if page not in old]
        if old and not pages:
            what = "is preempted" if state is SequenceState.PREEMPTED else "ends"
            lost += _list(f"{name} {what} and gives back", old)
        elif not old:
            gained += _list(f"{name} shares", [page for page in new if page in known])
            gained += _list(f"{name} takes", [page for page in new if page not in known])
        else:
            gained += _list(f"{name} grows into", new)
    return lost + gained


def _list(what: str, pages: list[int]) -> list[str]:
    return [f"{what} {' '.join(map(str, pages))}"] if pages else []


if __name__ == "__main__":
    print(draw())
