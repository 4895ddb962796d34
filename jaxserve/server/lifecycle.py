"""From an open port to a clean exit: listen, load, serve, drain.

The port is opened before the model is loaded: a port that is taken is known at once, and /health says
"starting" instead of refusing connections.
"""

from __future__ import annotations

import asyncio
import errno
import gc
import logging
import os
import signal
import socket
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from aiohttp import web

from jaxserve.errors import ConfigError, EngineDiedError, JaxserveError
from jaxserve.metrics import DEFAULT_PREFIX, Metrics, check_prefix
from jaxserve.server.app import make_app
from jaxserve.server.bridge import EngineClient
from jaxserve.server.http import connection_factory
from jaxserve.server.security import Keys, check_origins
from jaxserve.server.served import ServedModel
from jaxserve.server.state import ServerState, Serving
from jaxserve.server.tls import HANDSHAKE_TIMEOUT_S, ssl_context
from jaxserve.types import Event, KernelsInUse, MemoryUse

logger = logging.getLogger(__name__)

Deliver = Callable[[Sequence[Event]], None]
WATCH_INTERVAL_S = 0.5  # between looks at whether the engine lives
DEATH_NOTICE_S = 1.0  # that /health says so before the server closes
FAREWELL_S = 2.0  # for clients to take the last chunks
ENGINE_GRACE_S = 15.0  # beyond the timeout, for an engine that is held up by its device


@dataclass(frozen=True, slots=True)
class ServerOptions:
    host: str = "127.0.0.1"
    port: int = 8000  # 0: any free one
    max_body_bytes: int = 32 * 1024 * 1024
    metrics_prefix: str = DEFAULT_PREFIX
    shutdown_timeout_s: float = 30.0  # for running requests to end
    access_log: bool = False
    log_requests: bool = False  # their bodies too, so prompts
    api_keys: tuple[str, ...] = field(default=(), repr=False)  # none: open to everybody
    max_requests_per_key: int | None = None  # under way at a time
    allowed_origins: tuple[str, ...] = ()  # of web pages that may read answers
    max_header_bytes: int = 8190  # of the request line, and of each header
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None


@dataclass(frozen=True, slots=True)
class Loaded:
    """What a server needs to go from starting to ready; the engine has been started."""

    model: ServedModel
    engine: EngineClient
    compilations_after_warmup: Callable[[], int] | None = None
    memory: MemoryUse | None = None
    kernels: KernelsInUse | None = None


class StoppedWhileLoading(JaxserveError):
    """A signal came before the model was ready; the thread that loads it can't be stopped."""


class Server:
    """One listening server. Made, started and closed in one event loop."""

    def __init__(self, options: ServerOptions):
        check_prefix(options.metrics_prefix)
        check_origins(options.allowed_origins)
        self._options = options
        self._tls = ssl_context(options.ssl_certfile, options.ssl_keyfile)
        self._state = ServerState(log_requests=options.log_requests)
        app = make_app(
            self._state,
            max_body_bytes=options.max_body_bytes,
            keys=Keys(options.api_keys, max_requests=options.max_requests_per_key),
            allowed_origins=options.allowed_origins,
        )
        # handler_cancellation: a client that leaves cancels its handler, which aborts its requests.
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=FAREWELL_S)
        self._listener: asyncio.Server | None = None
        self._watch: asyncio.Task[str | None] | None = None

    @property
    def deliver(self) -> Deliver:
        """Where the engine's thread puts its events."""
        return self._state.bridge.deliver

    @property
    def url(self) -> str:
        """Where a client on this machine reaches the server."""
        assert self._listener is not None, "the server is not started"
        host, port = self._listener.sockets[0].getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
        scheme = "http" if self._tls is None else "https"
        return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"

    @property
    def num_open(self) -> int:
        """Requests whose answers are not complete."""
        return self._state.bridge.num_open

    async def start(self) -> None:
        """Listen. Raises ConfigError when the address can't be had."""
        await self._runner.setup()
        loop = asyncio.get_running_loop()
        options, http_server = self._options, self._runner.server
        assert http_server is not None
        try:
            self._listener = await loop.create_server(
                lambda: connection_factory(
                    http_server,
                    loop,
                    access_log=options.access_log,
                    max_header_bytes=options.max_header_bytes,
                ),
                options.host,
                options.port,
                backlog=1024,
                ssl=self._tls,
                ssl_handshake_timeout=None if self._tls is None else HANDSHAKE_TIMEOUT_S,
            )
        except (OSError, OverflowError) as exc:
            await self._runner.cleanup()
            raise ConfigError(_why_not(exc, options)) from None

    def attach(self, loaded: Loaded) -> None:
        """The model is there: take requests."""
        metrics = Metrics(
            loaded.model.name,
            prefix=self._options.metrics_prefix,
            engine_stats=loaded.engine.stats,
            compilations_after_warmup=loaded.compilations_after_warmup,
            memory=loaded.memory,
            kernels=loaded.kernels,
        )
        self._state.attach(Serving(loaded.model, loaded.engine, metrics))
        self._watch = asyncio.get_running_loop().create_task(self._watch_engine(loaded.engine))

    async def drain(self) -> None:
        """Refuse new requests, let running ones end, tell those that can't within the timeout."""
        self._state.begin_draining()
        if self._watch is None:
            return
        self._watch.cancel()
        timeout_s = self._options.shutdown_timeout_s
        engine, bridge = self._state.loaded().engine, self._state.bridge
        try:
            async with asyncio.timeout(timeout_s + ENGINE_GRACE_S):
                await in_thread(engine.drain, timeout_s)
        except TimeoutError:
            logger.error("the engine did not come to rest; its requests are cut off")
        except Exception:
            logger.exception("the engine could not be drained")
        await asyncio.sleep(0)  # events that were delivered are dispatched
        bridge.fail_all("abort", "the server is shutting down")

    async def close(self) -> None:
        """Stop listening and end every connection, giving answers under way a moment to go out."""
        if self._watch is not None:
            self._watch.cancel()
        if self._listener is not None:
            self._listener.close()
        await self._runner.cleanup()
        self._state.parsers.shutdown(wait=False, cancel_futures=True)

    async def engine_death(self) -> str | None:
        """Wait until the engine is dead and its clients are told; returns why it died."""
        assert self._watch is not None, "nothing is attached"
        return await asyncio.shield(self._watch)

    async def _watch_engine(self, engine: EngineClient) -> str | None:
        """Nobody may wait for an engine that is dead, even if it could not say so itself."""
        while (stats := engine.stats()).state != "dead":
            await asyncio.sleep(WATCH_INTERVAL_S)
        logger.error("the engine is dead: %s", stats.reason)
        self._state.die()
        await asyncio.sleep(WATCH_INTERVAL_S)  # its own last events may be under way
        self._state.bridge.fail_all("error", "the engine is dead")
        return stats.reason


async def serve(
    options: ServerOptions,
    load: Callable[[Deliver], Loaded],
    *,
    on_ready: Callable[[str, ServedModel], None],
    on_draining: Callable[[int], None] = lambda num_open: None,
) -> None:
    """Listen, run `load` in a thread, serve until SIGINT or SIGTERM, drain and return.

    A second signal ends the process at once. Raises what `load` raises, ConfigError when the address
    can't be had, StoppedWhileLoading when a signal comes before the model is ready, and EngineDiedError
    when the engine dies: its clients are told, /health says so for a moment, then the server closes.
    """
    server = Server(options)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, _on_signal, stop)
    try:
        await server.start()
        stopping = loop.create_task(stop.wait())
        loading = in_thread(load, server.deliver)
        await asyncio.wait((stopping, loading), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            raise StoppedWhileLoading("stopped while the model was loading")
        loaded = loading.result()
        # What start-up made stays. To look through it would stop all threads for a tenth of a second.
        gc.collect()
        gc.freeze()
        server.attach(loaded)
        on_ready(server.url, loaded.model)
        dying = loop.create_task(server.engine_death())
        await asyncio.wait((stopping, dying), return_when=asyncio.FIRST_COMPLETED)
        if not stopping.done():
            await asyncio.sleep(DEATH_NOTICE_S)
            raise EngineDiedError(f"the engine has failed: {dying.result()}; start the server again")
        dying.cancel()
        on_draining(server.num_open)
        await server.drain()
    finally:
        await server.close()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _on_signal(stop: asyncio.Event) -> None:
    if stop.is_set():  # asked twice: no more waiting, not even for the device
        os._exit(130)
    stop.set()


def in_thread[T](function: Callable[..., T], *args: object) -> asyncio.Future[T]:
    """Run in a daemon thread: unlike the loop's executor, one that hangs does not hold up the exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():  # nobody waits any more
            return
        if error is None:
            future.set_result(result)  # type: ignore[arg-type]
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function(*args)
        except BaseException as exc:
            error = exc
        try:
            loop.call_soon_threadsafe(settle, result, error)
        except RuntimeError:
            logger.debug("%s ended after the event loop", function)

    threading.Thread(target=run, name=f"jaxserve-{function.__name__}", daemon=True).start()
    return future


def _why_not(exc: OSError | OverflowError, options: ServerOptions) -> str:
    where = f"{options.host} port {options.port}"
    if isinstance(exc, socket.gaierror):
        return f"--host {options.host!r} is no address of this machine: {exc.strerror}"
    number = getattr(exc, "errno", None)
    if number == errno.EADDRINUSE:
        return f"{where} is in use by another process: pass another --port (0 picks a free one)"
    if number == errno.EACCES:
        return f"{where} may not be opened by this user: pass a --port above 1023"
    if number == errno.EADDRNOTAVAIL:
        return f"--host {options.host!r} is no address of this machine: use 127.0.0.1 or 0.0.0.0"
    return f"can't listen on {where}: {getattr(exc, 'strerror', None) or exc}"
