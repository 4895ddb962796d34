from __future__ import annotations

import errno
import fcntl
import os
import threading

import pytest

from jaxserve.errors import WeightsError
from jaxserve.weights.progress import watch_folder
from jaxserve.weights.staging import require_space, reserve, staging_folder


def test_the_body_builds_beside_the_target_and_its_folder_is_removed(tmp_path):
    target = tmp_path / "new" / "target"
    with staging_folder(target) as folder:
        assert folder.parent == target.parent
        assert folder.name.startswith(".target.")
        (folder / "x").write_text("done")
        (folder / "x").rename(target)
    assert [p.name for p in target.parent.iterdir()] == ["target"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_the_body_leaves_nothing_and_passes(error, tmp_path):
    def body() -> None:
        with staging_folder(tmp_path / "t") as folder:
            (folder / "deep").mkdir()
            (folder / "deep" / "file").touch()
            raise error

    with pytest.raises(error):
        body()
    assert list(tmp_path.iterdir()) == []


def test_an_oserror_in_the_body_is_told_in_words(tmp_path):
    full = r"t can't be written: the disk is full \(\d+ MiB free in "
    with pytest.raises(WeightsError, match=full), staging_folder(tmp_path / "t"):
        raise OSError(errno.ENOSPC, "No space left on device")
    denied = r"t can't be written: Permission denied \(/x\)"
    with pytest.raises(WeightsError, match=denied), staging_folder(tmp_path / "t"):
        raise PermissionError(errno.EACCES, "Permission denied", "/x")


def test_what_a_dead_process_left_is_removed_but_not_what_a_live_one_holds(tmp_path):
    stale = tmp_path / ".t[1].partial-dead"
    stale.mkdir()
    (stale / "file").touch()
    other = tmp_path / ".t.partial-other-target"
    other.mkdir()
    with staging_folder(tmp_path / "t[1]"):
        assert not stale.exists()
        assert other.exists()
    fd = os.open(other, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    held = "being written by another process"
    with pytest.raises(WeightsError, match=held), staging_folder(tmp_path / "t"):
        pass
    os.close(fd)
    assert other.exists()


def test_space_is_required_of_the_nearest_folder_that_exists(tmp_path):
    require_space(tmp_path / "a" / "b" / "c", 1)
    with pytest.raises(WeightsError, match=f"{tmp_path} has .* MiB free"):
        require_space(tmp_path / "a" / "b" / "c", 1 << 60)


def test_reserving_takes_nothing_and_more_than_there_is_fails(tmp_path):
    reserve(tmp_path, 1 << 20)
    with pytest.raises(OSError, match=r"."):
        reserve(tmp_path, 1 << 60)
    assert list(tmp_path.iterdir()) == []


def test_a_watched_folder_reports_growth_and_then_the_total(tmp_path):
    grown = threading.Event()
    calls = []

    def progress(description: str, done: int, total: int) -> None:
        calls.append((description, done, total))
        if done == 30:
            grown.set()

    (tmp_path / "before").write_bytes(bytes(7))
    with watch_folder(tmp_path, "work", 100, progress):
        (tmp_path / "file").write_bytes(bytes(30))
        assert grown.wait(10)
    assert calls[0] == ("work", 0, 100)
    assert calls[-1] == ("work", 100, 100)
