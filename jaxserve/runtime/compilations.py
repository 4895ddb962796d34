"""Counting XLA compilations, to show that none happens after warm-up."""

from __future__ import annotations

import threading

import jax

EVENT = "/jax/core/compile/backend_compile_duration"


class CompilationCounter:
    """Counts the compilations of this process from its construction on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._closed = False
        jax.monitoring.register_event_duration_secs_listener(self._listen)

    def _listen(self, event: str, duration_secs: float, **details: str | int) -> None:
        if event == EVENT:
            with self._lock:
                self._count += 1

    @property
    def count(self) -> int:
        return self._count

    def close(self) -> None:
        """Stop counting; the count stays. A second call does nothing."""
        if not self._closed:
            self._closed = True
            jax.monitoring.unregister_event_duration_listener(self._listen)
