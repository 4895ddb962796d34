"""Where `chat` and `complete` get their text from: a server, or an engine in this process."""

from __future__ import annotations

import argparse
import http.client
import json
import queue
import time
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Any, Protocol
from urllib.parse import urlsplit

from jaxserve.commands.console import ConsoleProgress, set_up_logging
from jaxserve.commands.flags import launch_options
from jaxserve.errors import JaxserveError
from jaxserve.types import Event

CONNECT_TIMEOUT_S = 10.0
ANSWER_TIMEOUT_S = 600.0  # between two pieces of an answer, time in the queue included
STOP_TIMEOUT_S = 10.0


class Backend(Protocol):
    def stream(self, path: str, body: dict[str, Any]) -> Generator[str]:
        """The pieces of the answer to `body` at `path`, "chat/completions" or "completions".

        Closing the iterator early ends the request. Raises JaxserveError.
        """
        ...

    def close(self) -> None: ...


def open_backend(args: argparse.Namespace) -> Backend:
    """A server's when --url is given, else an engine for the model in this process."""
    if args.url is not None:
        return RemoteBackend(args.url, args.model_name)
    return LocalBackend(args)


class RemoteBackend:
    """Any OpenAI-compatible server. Without a name it asks for the first model that is served."""

    def __init__(self, url: str, model_name: str | None):
        parts = urlsplit(url if "://" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise JaxserveError(f"--url {url!r} is no http or https address")
        self._url = url
        self._base = parts.path.rstrip("/").removesuffix("/v1")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        try:
            self._connect = partial(kind, parts.hostname, parts.port, timeout=CONNECT_TIMEOUT_S)
        except ValueError as error:  # urlsplit reads the port only when it is asked for
            raise JaxserveError(f"--url {url!r}: {error}") from None
        self._model = model_name or self._first_model()

    def stream(self, path: str, body: dict[str, Any]) -> Generator[str]:
        body = {"model": self._model, **body, "stream": True}
        connection, response = self._request("POST", f"/v1/{path}", json.dumps(body))
        try:
            for line in self._lines(response):
                if not line.startswith(b"data: "):
                    continue
                data = line[6:].strip()
                if data == b"[DONE]":
                    return
                if text := _chunk_text(json.loads(data)):
                    yield text
        finally:
            connection.close()

    def close(self) -> None:
        """Connections last as long as an answer: none is left."""

    def _first_model(self) -> str:
        connection, response = self._request("GET", "/v1/models")
        try:
            return json.loads(response.read())["data"][0]["id"]
        except (ValueError, LookupError, TypeError):
            raise JaxserveError(f"{self._url} lists no models; pass --model-name") from None
        finally:
            connection.close()

    def _request(
        self, method: str, path: str, body: str | None = None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        connection = self._connect()
        try:
            connection.request(method, self._base + path, body, {"Content-Type": "application/json"})
            assert connection.sock is not None
            connection.sock.settimeout(ANSWER_TIMEOUT_S)
            response = connection.getresponse()
            if response.status == 200:
                return connection, response
            answer = response.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise JaxserveError(f"{self._url} can't be reached: {error}") from None
        connection.close()
        try:
            message = json.loads(answer)["error"]["message"]
        except (ValueError, LookupError, TypeError):
            message = response.reason
        raise JaxserveError(f"{self._url} answers {response.status}: {message}")

    def _lines(self, response: http.client.HTTPResponse) -> Iterator[bytes]:
        try:
            yield from response
        except (OSError, http.client.HTTPException) as error:
            raise JaxserveError(f"{self._url} ended the answer: {error}") from None


def _chunk_text(chunk: dict[str, Any]) -> str:
    if "error" in chunk:
        raise JaxserveError(chunk["error"].get("message", "the server failed"))
    for choice in chunk.get("choices", ()):
        return choice.get("text") or choice.get("delta", {}).get("content") or ""
    return ""


class LocalBackend:
    """An engine in this process. Requests go through the same parser as a server's."""

    def __init__(self, args: argparse.Namespace):
        from jaxserve.commands.model import served_model
        from jaxserve.launch import load_engine

        set_up_logging(args.log_level)
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        with ConsoleProgress() as progress:
            self._loaded = load_engine(launch_options(args), deliver=self._deliver, progress=progress)
        self._model = served_model(self._loaded)

    def stream(self, path: str, body: dict[str, Any]) -> Generator[str]:
        from jaxserve.server import openai

        parse = openai.parse_chat if path == "chat/completions" else openai.parse_completion
        (request,) = parse(body, self._model, time.monotonic()).requests
        engine = self._loaded.engine
        engine.submit(request)
        ended = False
        try:
            while not ended:
                event = self._events.get()
                if event.request_id != request.request_id:  # left over from an answer that was stopped
                    continue
                ended = event.finish_reason is not None
                if event.finish_reason == "error":
                    raise JaxserveError(f"the engine failed: {event.error}")
                if event.text:
                    yield event.text
        finally:
            if not ended:
                engine.abort(request.request_id)

    def close(self) -> None:
        self._loaded.engine.stop(0.0)

    def _deliver(self, events: Sequence[Event]) -> None:
        for event in events:
            self._events.put(event)
