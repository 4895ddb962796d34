from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from jaxserve.errors import QueueFullError
from jaxserve.server.bridge import Bridge, Stream
from jaxserve.types import EngineStats, Event, Request, SamplingParams


class RecordingEngine:
    """Takes up to `room` requests and writes down what it was told."""

    def __init__(self, room: int = 100):
        self.room = room
        self.submitted: list[str] = []
        self.aborted: list[str] = []

    def submit(self, request: Request) -> None:
        if len(self.submitted) == self.room:
            raise QueueFullError("full")
        self.submitted.append(request.request_id)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def stats(self) -> EngineStats:
        return EngineStats()

    def drain(self, timeout_s: float) -> None: ...


class Recorder:
    """An observer that writes down what happened."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []

    def track(self, request: Request) -> Recorder.Track:
        return self.Track(self.log, request.request_id)

    class Track:
        def __init__(self, log: list[tuple[str, str]], request_id: str):
            self._log, self._id = log, request_id

        def event(self, event: Event) -> None:
            self._log.append((self._id, event.text))

        def abandoned(self) -> None:
            self._log.append((self._id, "abandoned"))


def request(name: str) -> Request:
    return Request(name, (1,), SamplingParams(max_tokens=4), 0.0)


def event(name: str, text: str, *, last: bool = False) -> Event:
    return Event(name, 0.0, (7,), text, finish_reason="stop" if last else None, num_output_tokens=len(text))


def in_loop(test: Callable[[Bridge, RecordingEngine], Awaitable[None]]) -> None:
    async def run() -> None:
        await asyncio.wait_for(test(Bridge(), RecordingEngine()), 5)

    asyncio.run(run())


async def all_of(stream: Stream) -> list[tuple[int, str]]:
    got = []
    while events := await stream.next():
        got += [(index, event.text) for index, event in events]
    return got


def test_a_turn_wakes_the_loop_once_however_many_requests_it_has():
    async def test(bridge: Bridge, engine: RecordingEngine) -> None:
        calls = []
        bridge.loop = type("Loop", (), {"call_soon_threadsafe": lambda self, *args: calls.append(args)})()
        bridge.deliver([event("a", "1"), event("b", "2"), event("a", "3")])
        assert len(calls) == 1

    in_loop(test)


def test_events_reach_the_stream_of_their_request_with_its_index():
    async def test(bridge: Bridge, engine: RecordingEngine) -> None:
        with bridge.open(engine, [request("a"), request("b")]) as one, bridge.open(
            engine, [request("c")]
        ) as two:
            bridge.deliver([event("c", "x"), event("b", "y", last=True), event("a", "z")])
            bridge.deliver([event("a", "", last=True), event("c", "!", last=True)])
            assert await all_of(one) == [(1, "y"), (0, "z")]
            assert await all_of(two) == [(0, "x!")]
        assert bridge.num_open == 0
        assert engine.aborted == []

    in_loop(test)


def test_a_slow_reader_finds_the_events_of_a_request_joined():
    async def test(bridge: Bridge, engine: RecordingEngine) -> None:
        with bridge.open(engine, [request("a")]) as stream:
            for text in "abc":
                bridge.deliver([event("a", text)])
            bridge.deliver([event("a", "d", last=True)])
            await asyncio.sleep(0.01)
            [(index, joined)] = await stream.next()
            assert (index, joined.text, joined.token_ids) == (0, "abcd", (7, 7, 7, 7))
            assert joined.finish_reason == "stop"
            assert stream.ended
            assert await stream.next() == []

    in_loop(test)


@pytest.mark.parametrize("reason", ["error", "abort", "timeout", "grammar"])
def test_what_came_before_a_failure_is_not_lost_in_it(reason):
    async def test(bridge: Bridge, engine: RecordingEngine) -> None:
        with bridge.open(engine, [request("a"), request("b")]) as stream:
            bridge.deliver([event("a", "x"), event("b", "y")])
            bridge.deliver([event("a", "z")])
            bridge.deliver([event("a", "")._replace(finish_reason=reason), event("b", "!", last=True)])
            await asyncio.sleep(0.01)
            got = [(index, one.text, one.finish_reason) for index, one in await stream.next()]
            assert got == [(0, "xz", None), (1, "y!", "stop"), (0, "", reason)]

    in_loop(test)


def test_leaving_a_stream_aborts_what_has_not_ended_and_drops_what_still_comes():
    async def test(bridge: Bridge, engine: RecordingEngine) -> None:
        bridge.observer = recorder = Recorder()
        with bridge.open(engine, [request("a"), request("b")]) as stream:
            bridge.deliver([event("a", "x", last=True)])
            await stream.next()
        assert engine.aborted == ["b"]
        bridge.deliver([event("b", "late", last=True)])
        await asyncio.sleep(0.01)
        assert recorder.log == [("a", "x"), ("b", "abandoned")]
        assert bridge.num_open == 0

    in_loop(test)


def test_all_requests_are_taken_or_none():
    async def test(bridge: Bridge, engine: RecordingEngine) -> None:
        engine.room = 2
        with pytest.raises(QueueFullError):
            bridge.open(engine, [request(name) for name in "abc"])
        assert engine.submitted == engine.aborted == ["a", "b"]
        assert bridge.num_open == 0

    in_loop(test)


def test_failing_all_ends_every_stream():
    async def test(bridge: Bridge, engine: RecordingEngine) -> None:
        streams = [bridge.open(engine, [request(name)]) for name in "abc"]
        readers = [asyncio.ensure_future(stream.next()) for stream in streams]
        await asyncio.sleep(0)
        bridge.fail_all("error", "why")
        for reader in readers:
            [(_, failed)] = await reader
            assert (failed.finish_reason, failed.error) == ("error", "why")
        assert bridge.num_open == 0

    in_loop(test)


def test_delivering_after_the_loop_has_closed_is_harmless():
    async def make() -> Bridge:
        return Bridge()

    asyncio.run(make()).deliver([event("a", "x")])
