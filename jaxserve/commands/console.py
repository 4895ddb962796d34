"""What commands show on stderr while they work: log lines and progress bars."""

from __future__ import annotations

import logging
import sys
import threading
import time
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import TaskID

LINE_INTERVAL_S = 5.0  # between lines where stderr is no terminal
NEVER = float("inf")


def set_up_logging(level: str) -> None:
    logging.basicConfig(
        level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr
    )


class ConsoleProgress:
    """A `progress(description, completed, total)` that draws one bar for each description.

    A context manager, to be called from any thread. Where stderr is no terminal it prints a line when a
    description begins and ends, and one every few seconds between.
    """

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

        console = Console(stderr=True)
        self._lock = threading.Lock()
        self._due_s: dict[str, float] = {}  # when each description gets its next line
        self._tasks: dict[str, TaskID] = {}
        self._bars = None
        if console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[amount]}"),
                TimeElapsedColumn(),
                console=console,
            )

    def __enter__(self) -> ConsoleProgress:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()

    def __call__(self, description: str, completed: int, total: int) -> None:
        amount = _amount(completed, total)
        with self._lock:
            if self._bars is None:
                self._line(description, completed, total, amount)
            elif description in self._tasks:
                self._bars.update(
                    self._tasks[description], completed=completed, total=total, amount=amount
                )
            else:
                self._tasks[description] = self._bars.add_task(
                    description, completed=completed, total=total, amount=amount
                )

    def _line(self, description: str, completed: int, total: int, amount: str) -> None:
        now, ended = time.monotonic(), completed >= total
        due_s = self._due_s.get(description, now)
        if (ended and due_s != NEVER) or now >= due_s:
            print(f"{description}: {amount}", file=sys.stderr, flush=True)
            due_s = now + LINE_INTERVAL_S
        self._due_s[description] = NEVER if ended else due_s


def _amount(completed: int, total: int) -> str:
    """ "3/8", or megabytes where the numbers are too large to be things."""
    if total >= 1_000_000:
        return f"{completed / 1e6:.0f}/{total / 1e6:.0f} MB"
    return f"{completed}/{total}"
