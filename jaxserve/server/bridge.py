"""Between the engine's thread and the event loop: requests go in, events come out.

The engine hands over one list of events a turn, which costs one wake-up of the loop whatever the number
of requests. A stream's backlog is bounded by what its requests may generate: a client that reads slowly
finds several events joined into one, and the device never waits for it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from typing import Protocol

from jaxserve.types import EngineStats, Event, FinishReason, Request

logger = logging.getLogger(__name__)


class EngineClient(Protocol):
    """The engine as the front end sees it; every method may be called from any thread."""

    def submit(self, request: Request) -> None:
        """Queue the request; raises a RequestError when it can't be served."""
        ...

    def abort(self, request_id: str) -> None: ...

    def stats(self) -> EngineStats: ...

    def drain(self, timeout_s: float) -> object:
        """Take no new requests and block until those at work ended, or were aborted at the timeout."""
        ...


class Track(Protocol):
    """Follows one request for the metrics."""

    def event(self, event: Event) -> None: ...

    def abandoned(self) -> None:
        """The client left before the last event."""
        ...


class Observer(Protocol):
    def track(self, request: Request) -> Track: ...


class Stream:
    """The events of the requests that answer one HTTP request.

    A context manager: leaving it aborts whatever has not ended.
    """

    def __init__(self, bridge: Bridge, engine: EngineClient):
        self._bridge = bridge
        self._engine = engine
        self._open: dict[str, int] = {}  # index of each request whose last event has not come
        self._backlog: list[tuple[int, Event]] = []
        self._waiter: asyncio.Future[None] | None = None

    @property
    def ended(self) -> bool:
        """There is nothing left for `next` to wait for."""
        return not self._open and not self._backlog

    async def next(self) -> list[tuple[int, Event]]:
        """The new events as (index of the request, event): at least one, at most one an index, or two
        where the second one is a failure.

        Once every last event has been given out, the list is empty.
        """
        while not self._backlog and self._open:
            self._waiter = self._bridge.loop.create_future()
            await self._waiter
        backlog, self._backlog = self._backlog, []
        return _joined(backlog) if len(backlog) > 1 else backlog

    def add(self, request_id: str, index: int) -> None:
        self._open[request_id] = index

    def put(self, event: Event) -> None:
        index = self._open[event.request_id]
        self._backlog.append((index, event))
        if event.finish_reason is not None:
            del self._open[event.request_id]
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exc: object) -> None:
        for request_id in self._open:
            self._engine.abort(request_id)
            self._bridge.forget(request_id)
        self._open = {}


class Bridge:
    """Routes events to streams. All but `deliver` belongs to the event loop it was made in."""

    def __init__(self, observer: Observer | None = None):
        self.loop = asyncio.get_running_loop()
        self.observer = observer
        self._routes: dict[str, tuple[Stream, Track | None]] = {}

    @property
    def num_open(self) -> int:
        """Requests whose last event has not come."""
        return len(self._routes)

    def open(self, engine: EngineClient, requests: Sequence[Request]) -> Stream:
        """Submit all the requests, or none: raises the engine's RequestError."""
        stream = Stream(self, engine)
        try:
            for index, request in enumerate(requests):
                engine.submit(request)
                # Events come through the loop, so none can be dispatched before this is written down.
                stream.add(request.request_id, index)
                track = None if self.observer is None else self.observer.track(request)
                self._routes[request.request_id] = stream, track
        except BaseException:
            with stream:  # abort those that were taken
                raise
        return stream

    def deliver(self, events: Sequence[Event]) -> None:
        """Called by the engine's thread, once a turn."""
        try:
            self.loop.call_soon_threadsafe(self._dispatch, tuple(events))
        except RuntimeError:  # the loop is closed: the server has gone, nobody is left to tell
            logger.debug("dropped %d events after the server closed", len(events))

    def fail_all(self, reason: FinishReason, error: str) -> None:
        """End every open request as the engine would have: "abort" or "error"."""
        now = time.monotonic()
        self._dispatch([
            Event(request_id, now, finish_reason=reason, error=error) for request_id in self._routes
        ])

    def forget(self, request_id: str) -> None:
        """The client left: events still under way are dropped."""
        route = self._routes.pop(request_id, None)
        if route is not None and route[1] is not None:
            route[1].abandoned()

    def _dispatch(self, events: Sequence[Event]) -> None:
        for event in events:
            route = self._routes.get(event.request_id)
            if route is None:  # aborted: its client has left
                continue
            stream, track = route
            if event.finish_reason is not None:
                del self._routes[event.request_id]
            if track is not None:
                track.event(event)
            stream.put(event)


def _joined(backlog: list[tuple[int, Event]]) -> list[tuple[int, Event]]:
    """Consecutive events of one request as one event, in the order of their first ones.

    A failure stays by itself: it is told in place of the event's text, and what came before it was an answer.
    """
    groups: dict[int, list[Event]] = {}
    failures = []
    for index, event in backlog:
        if event.finish_reason in (None, "stop", "length"):
            groups.setdefault(index, []).append(event)
        else:
            failures.append((index, event))
    return [*((index, _join(events)) for index, events in groups.items()), *failures]


def _join(events: list[Event]) -> Event:
    if len(events) == 1:
        return events[0]
    return events[-1]._replace(
        token_ids=tuple(token_id for event in events for token_id in event.token_ids),
        text="".join([event.text for event in events]),
        logprobs=tuple(one for event in events for one in event.logprobs),
        prompt_logprobs=events[0].prompt_logprobs,
    )
