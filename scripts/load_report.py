"""Figures as rows of docs/benchmarks.md."""

from __future__ import annotations

import math
import os
import platform
import sys
import time
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def ms(seconds: float) -> str:
    """Milliseconds with three digits or more; "-" for NaN."""
    if math.isnan(seconds):
        return "-"
    value = 1e3 * seconds
    return f"{value:,.0f} ms" if value >= 100 else f"{value:.1f} ms"


def ratio(value: float, to: float) -> str:
    return f"{value / to:.2f}" if to and not math.isnan(value / to) else "-"


def show(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print what ran on what and when, and the table."""
    print(f"{_command()}; {_machine()}; {time.strftime('%d %B %Y')}\n\n{table(columns, rows)}", flush=True)


def fail_on(problems: Sequence[str]) -> int:
    """The exit status; problems go to stderr."""
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)
    return 1 if problems else 0


def _command() -> str:
    return " ".join([f"scripts/{Path(sys.argv[0]).name}", *sys.argv[1:]])


def _machine() -> str:
    cpu = platform.machine()
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        cpu = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), cpu)
    except OSError:
        pass
    return f"{len(os.sched_getaffinity(0))} x {cpu}, Python {platform.python_version()}, jax {version('jax')}"
