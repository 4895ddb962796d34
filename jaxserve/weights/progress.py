"""Telling how far a long step has come."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Called with a description, what is done and the total, in the same unit (bytes or things). May be
# called from another thread than the one that does the work.
Progress = Callable[[str, int, int], None]
POLL_S = 0.2


@contextmanager
def watch_folder(
    folder: Path, description: str, total_bytes: int, progress: Progress | None
) -> Iterator[None]:
    """While the body runs, report the size of what it writes below `folder`, in bytes.

    For work done by others (pip, orbax) that has no callback of its own. Ends at the total, unless the
    body raises.
    """
    if progress is None:
        yield
        return
    done = threading.Event()

    before = folder_bytes(folder)

    def poll() -> None:
        while not done.wait(POLL_S):
            progress(description, min(folder_bytes(folder) - before, total_bytes), total_bytes)

    progress(description, 0, total_bytes)
    thread = threading.Thread(target=poll, name="watch_folder", daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
    progress(description, total_bytes, total_bytes)


def folder_bytes(folder: Path) -> int:
    """Size of all files below `folder`. Files that come and go while it counts don't matter."""
    total = 0
    for parent, _, names in folder.walk():
        for name in names:
            try:
                total += (parent / name).stat().st_size
            except OSError:
                continue
    return total
