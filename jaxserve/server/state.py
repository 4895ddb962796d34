"""What every handler shares: the model and engine once they are there, and how the server feels."""

from __future__ import annotations

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from aiohttp import web

from jaxserve.errors import UnavailableError
from jaxserve.metrics import Metrics
from jaxserve.server.bridge import Bridge, EngineClient
from jaxserve.server.served import ServedModel

NUM_PARSERS = 2  # threads for long bodies
request_log = logging.getLogger("jaxserve.requests")


@dataclass(frozen=True, slots=True)
class Serving:
    """All that answering needs."""

    model: ServedModel
    engine: EngineClient
    metrics: Metrics


class ServerState:
    """Starting until `attach`, then ready; draining or dead for good."""

    def __init__(self, *, log_requests: bool = False) -> None:
        self._log_requests = log_requests
        if log_requests:
            request_log.setLevel(logging.INFO)
        self.bridge = Bridge()
        self.parsers = ThreadPoolExecutor(NUM_PARSERS, thread_name_prefix="jaxserve-parse")
        self._serving: Serving | None = None
        self._phase: Literal["starting", "ready", "draining", "dead"] = "starting"
        self._reason = "The model is loading."

    def attach(self, serving: Serving) -> None:
        self.bridge.observer = serving.metrics
        self._serving = serving
        if self._phase == "starting":
            self._phase = "ready"

    def log_request(self, method: str, path: str, body: object) -> None:
        """Log what a client sent, prompts included, if that was asked for."""
        if self._log_requests:
            request_log.info("%s %r %s", method, path, json.dumps(body))

    def begin_draining(self) -> None:
        self._phase, self._reason = "draining", "The server is shutting down."

    def die(self) -> None:
        self._phase, self._reason = "dead", "The engine has failed; the server must be restarted."

    def loaded(self) -> Serving:
        """What is served, ready or not; raises UnavailableError while it loads."""
        if self._serving is None:
            raise UnavailableError(self._reason)
        return self._serving

    def serving(self) -> Serving:
        """What is served; raises UnavailableError unless requests are taken."""
        if self._phase != "ready":
            raise UnavailableError(self._reason)
        serving = self.loaded()
        stats = serving.engine.stats()
        if stats.state != "ready":
            raise UnavailableError(f"The engine is {stats.state}: {stats.reason or 'no reason given'}.")
        return serving


STATE = web.AppKey("state", ServerState)
