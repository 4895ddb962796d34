"""Calling orbax so that a failure is one exception with one line of text.

Left alone, a failed save or restore (a full disk, a corrupt index) also prints, for every array that was
under way, tracebacks from log handlers, from abandoned coroutines when Python collects them, and from
threads that report to an event loop which is closed by then.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
from collections.abc import Callable

from jaxserve.errors import JaxserveError

LOGGERS = ("absl", "asyncio")


class OrbaxError(Exception):
    """What orbax said, in one line."""


def call_orbax[T](work: Callable[[], T]) -> T:
    """The result of `work`. Raises OSError where the cause was one, else OrbaxError; JaxserveError passes.

    After a failure, orbax's reports stay switched off: its threads may make them at any time.
    """
    report_again = _ignore_reports()
    try:
        result = work()
    except JaxserveError:
        report_again()
        raise
    except Exception as error:  # tensorstore and orbax raise whatever the defect leads to
        failure = _summary(error)
    else:
        report_again()
        return result
    # The exception and its frames are gone: what hangs on them ends here, unheard.
    gc.collect()
    raise failure


def _summary(error: Exception) -> Exception:
    if isinstance(error, OSError) and error.errno is not None:
        return OSError(error.errno, error.strerror, error.filename)
    if (code := re.search(r"os_error_code='(\d+)'", str(error))) is not None:  # tensorstore
        return OSError(int(code[1]), os.strerror(int(code[1])))
    lines = str(error).strip().splitlines() or [""]
    return OrbaxError(f"{type(error).__name__}: {lines[0][:300]}")


def _ignore_reports() -> Callable[[], None]:
    """Drop what orbax logs and leaves for Python to report; returns what undoes it."""
    show = sys.unraisablehook
    loggers = [logging.getLogger(name) for name in LOGGERS]

    def hook(args: sys.UnraisableHookArgs) -> None:
        code = getattr(args.object, "cr_code", None)
        of_orbax = code is not None and "orbax" in code.co_filename
        if not of_orbax and "Event loop is closed" not in str(args.exc_value):
            show(args)

    def keep(record: logging.LogRecord) -> bool:
        return "orbax" not in record.pathname and "orbax" not in record.getMessage()

    def undo() -> None:
        sys.unraisablehook = show
        for logger in loggers:
            logger.removeFilter(keep)

    sys.unraisablehook = hook
    for logger in loggers:
        logger.addFilter(keep)
    return undo
