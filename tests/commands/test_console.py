"""Progress on a terminal and elsewhere."""

from __future__ import annotations

import os
import pty
from contextlib import suppress

from jaxserve.commands.console import ConsoleProgress


def test_progress_without_a_terminal_is_a_line_at_the_begin_and_at_the_end(capsys):
    with ConsoleProgress() as progress:
        for done in range(11):
            progress("compiling", done, 10)
        progress("compiling", 10, 10)
    assert capsys.readouterr().err == "compiling: 0/10\ncompiling: 10/10\n"


def test_a_terminal_shows_a_bar(monkeypatch):
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        with ConsoleProgress() as progress:
            progress("compiling", 3, 8)
            progress("compiling", 8, 8)
    shown = b""
    with suppress(OSError):  # that is how the end of a terminal shows
        while piece := os.read(leader, 1 << 16):
            shown += piece
    os.close(leader)
    assert b"compiling" in shown
    assert b"8/8" in shown
