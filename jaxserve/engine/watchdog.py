"""Notices a turn of the engine that takes far too long, while it still goes on."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

MOST_BETWEEN_LOOKS_S = 5.0


class Watchdog:
    """A thread that looks at the engine's. It logs and counts each turn over the limit, once, and never
    ends anything: a device that takes long may still answer, and whoever supervises can see it.

    `busy_since` tells when the turn at hand began, in `time.monotonic()` seconds; None between turns.
    """

    def __init__(self, limit_s: float, busy_since: Callable[[], float | None]):
        self._limit_s = limit_s
        self._busy_since = busy_since
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self.num_slow = 0

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="jaxserve-watchdog", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        reported: float | None = None
        while not self._stopped.wait(min(self._limit_s / 4, MOST_BETWEEN_LOOKS_S)):
            began_s = self._busy_since()
            if began_s is None or began_s == reported:
                continue
            if (took_s := time.monotonic() - began_s) > self._limit_s:
                reported = began_s
                self.num_slow += 1
                logger.error(
                    "a step has been running for %.0f s, the limit is %g s (--step-timeout): "
                    "the device hangs, or is far too slow for its batch",
                    took_s,
                    self._limit_s,
                )
