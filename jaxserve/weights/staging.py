"""Writing a file or folder so that under its own name it is either complete or not there."""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxserve.errors import WeightsError

REMOVE_TIMEOUT_S = 5


@contextmanager
def staging_folder(target: Path) -> Iterator[Path]:
    """A fresh hidden folder beside `target`, on the same file system, removed at the end.

    The body builds the result inside it (under a name of its own: this folder is private to the user)
    and moves that to `target` as its last act. What an earlier process left
    behind when it was killed is removed first; it is told from another's work in progress by a lock,
    which the system drops with the process. Raises WeightsError when another process is at work on the
    same target, and for every OSError of the body (a full disk), in words.
    """
    target = Path(os.path.abspath(target))
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_stale(target)
        folder = Path(tempfile.mkdtemp(prefix=_prefix(target), dir=target.parent))
        lock = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield folder
        finally:
            _remove(folder)
            os.close(lock)
    except OSError as error:
        raise WeightsError(f"{target} can't be written: {_describe(error, target.parent)}") from error


def _prefix(target: Path) -> str:
    return f".{target.name}.partial-"


def _remove_stale(target: Path) -> None:
    for path in target.parent.glob(f"{_escape(_prefix(target))}*"):
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise WeightsError(
                f"{target} is being written by another process (in {path}); wait for it or end it"
            ) from None
        else:
            shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(fd)


def _remove(folder: Path) -> None:
    """Delete a folder that a writer's threads may still be adding to after an error."""
    deadline = time.monotonic() + REMOVE_TIMEOUT_S
    shutil.rmtree(folder, ignore_errors=True)
    while folder.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
        shutil.rmtree(folder, ignore_errors=True)


def _escape(text: str) -> str:
    return "".join(f"[{c}]" if c in "*?[" else c for c in text)


def _describe(error: OSError, folder: Path) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(folder).free
        return f"the disk is full ({free / 2**20:.0f} MiB free in {folder})"
    return f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")


def require_space(target: Path, nbytes: int) -> None:
    """Raises WeightsError, before any work, when `nbytes` won't fit where `target` is to be written."""
    folder = Path(os.path.abspath(target)).parent
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if nbytes > free:
        raise WeightsError(
            f"{target} needs {nbytes / 2**20:.0f} MiB, {folder} has {free / 2**20:.0f} MiB free: "
            "make room or choose another place"
        )


def reserve(folder: Path, nbytes: int) -> None:
    """Raises OSError when the system won't give `nbytes` (disk, quota, file size limit); keeps nothing.

    For a writer that can't be trusted to fail well. Somebody may still take the room in between.
    """
    path = folder / "reserved"
    try:
        with open(path, "wb") as file:
            os.posix_fallocate(file.fileno(), 0, max(nbytes, 1))
    finally:
        path.unlink(missing_ok=True)


def sync_tree(folder: Path) -> None:
    """Have the system put every file and folder below `folder` on the disk."""
    for parent, _, names in folder.walk():
        for path in [*(parent / name for name in names), parent]:
            sync(path)


def sync(path: Path) -> None:
    """Have the system put one file, or a folder's list of names, on the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
