"""Who may use the server: API keys, how many requests each may have open, and which web pages."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from aiohttp import web

from jaxserve.errors import ConfigError, RequestError, UnavailableError
from jaxserve.server.errors import (
    Handler,
    TooManyRequests,
    Unauthorized,
    error_response,
)
from jaxserve.server.state import STATE

logger = logging.getLogger(__name__)

KEYS_VARIABLE = "JAXSERVE_API_KEY"
# What a probe, a scraper or a client that looks around may read without a key: no prompt, no model.
OPEN_PATHS = frozenset(("/health", "/metrics", "/load", "/version", "/openapi.json"))
PREFLIGHT_MAX_AGE_S = 600  # for which a browser remembers that it may ask
_KEY = re.compile(r"[!-~]+")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/\s?#@]+")


def gather_keys(given: Iterable[str], file: Path | None, environ: Mapping[str, str]) -> tuple[str, ...]:
    """The keys of the command line, of the file (one a line, # begins a comment) and of the environment.

    Raises ConfigError for a key that a header can't carry and for a file without keys. Its text never
    holds a key.
    """
    keys = [(key, "--api-key") for key in given]
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--api-key-file {file} can't be read: {error}") from None
        found = [line.partition("#")[0].strip() for line in lines]
        if not any(found):
            raise ConfigError(f"--api-key-file {file} holds no key: write one a line, or leave the flag out")
        keys += [(key, f"--api-key-file {file}") for key in found if key]
    keys += [(key, KEYS_VARIABLE) for key in environ.get(KEYS_VARIABLE, "").split()]
    for key, where in keys:
        if not _KEY.fullmatch(key):
            raise ConfigError(
                f"{where}: a key of {len(key)} characters can't be sent in a header; use one or more "
                "visible ASCII characters, without spaces"
            )
    return tuple(dict.fromkeys(key for key, _ in keys))


def check_origins(origins: Sequence[str]) -> None:
    """Raises ConfigError for what no browser sends as Origin."""
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise ConfigError(
                f"--allowed-origins {origin!r} is no origin: write it as a browser does, "
                "https://chat.example.org or http://localhost:3000, without a path; or * for all"
            )


class Keys:
    """The keys that open the server; without any, it is open to everybody. Keeps digests only."""

    def __init__(self, keys: Iterable[str] = (), *, max_requests: int | None = None):
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._max_requests = max_requests
        self._num_open: Counter[int] = Counter()  # requests, by index of the key
        if max_requests is not None and not self._digests:
            raise ConfigError(
                f"--max-requests-per-key {max_requests} needs keys: pass --api-key, or leave it out"
            )

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, authorization: str | None) -> int:
        """The index of the key in an Authorization header; raises Unauthorized.

        Takes the same time whichever key it is, and however much of it is right.
        """
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthorized("This server needs an API key: send the header 'Authorization: Bearer KEY'.")
        digest = hashlib.sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        matches = [hmac.compare_digest(digest, known) for known in self._digests]
        if True not in matches:
            raise Unauthorized("The API key in the header 'Authorization' is not one of this server's keys.")
        return matches.index(True)

    def enter(self, key: int) -> Place:
        """A place for one more request; raises TooManyRequests. `leave` must follow."""
        self._take(key, 1)
        return Place(self, key)

    def _take(self, key: int, count: int) -> None:
        num_open, most = self._num_open[key], self._max_requests
        if most is not None and num_open + count > most:
            more = "" if count == 1 else f", and this request needs {count} more places"
            raise TooManyRequests(
                f"This API key has {num_open} of the {most} requests under way that it may have "
                f"(--max-requests-per-key){more}: wait for one to end."
            )
        self._num_open[key] += count


class Place:
    """What one HTTP request counts for among those of its key: one at first, then each answer it asks for."""

    def __init__(self, keys: Keys, key: int):
        self._keys, self._key, self._size = keys, key, 1

    def grow(self, num_answers: int) -> None:
        """Raises TooManyRequests if there is no room now, RequestError if there never is."""
        most = self._keys._max_requests
        if most is not None and num_answers > most:
            raise RequestError(
                f"This request asks for {num_answers} answers, and an API key may have {most} under way "
                "(--max-requests-per-key): send fewer prompts, or lower 'n' or 'best_of'."
            )
        if num_answers > self._size:
            self._keys._take(self._key, num_answers - self._size)
            self._size = num_answers

    def leave(self) -> None:
        self._keys._num_open[self._key] -= self._size


KEYS = web.AppKey("keys", Keys)
PLACE = web.RequestKey("place", Place)
ORIGINS = web.AppKey("origins", frozenset[str])


def check_key(request: web.Request) -> int | None:
    """The key that the request came with; None where none is asked for. Raises Unauthorized."""
    keys = request.app[KEYS]
    resource = request.match_info.route.resource
    if not keys or (resource is not None and resource.canonical in OPEN_PATHS):
        return None
    return keys.check(request.headers.get("Authorization"))


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Lets a request with a good key pass, and counts it while it lasts if it asks for work."""
    if _is_preflight(request):
        return _preflight(request)
    try:
        key = check_key(request)
    except Unauthorized as error:
        logger.info("%s %r from %s has no valid key", request.method, request.path, request.remote)
        _count(request, error)
        return error_response(error)
    if key is None or request.method != "POST":
        return await handler(request)
    keys = request.app[KEYS]
    try:
        place = request[PLACE] = keys.enter(key)
    except TooManyRequests as error:
        _count(request, error)
        raise
    try:
        return await handler(request)
    finally:
        place.leave()


def count_answers(request: web.Request, num_answers: int) -> None:
    """Let the request take as many places of its key as it asks for answers: each is work like a request.

    Raises RequestError if they are not there.
    """
    if (place := request.get(PLACE)) is not None:
        place.grow(num_answers)


def _count(request: web.Request, error: RequestError) -> None:
    with contextlib.suppress(UnavailableError):  # there are no metrics before the model is there
        request.app[STATE].loaded().metrics.reject(error.code)


def _is_preflight(request: web.Request) -> bool:
    return (
        request.method == "OPTIONS"
        and "Access-Control-Request-Method" in request.headers
        and _allowed_origin(request) is not None
    )


def _preflight(request: web.Request) -> web.Response:
    """A browser's question before a page of an allowed origin may send its request; it carries no key."""
    headers = {
        "Access-Control-Allow-Methods": "GET, POST",
        "Access-Control-Max-Age": str(PREFLIGHT_MAX_AGE_S),
    }
    if asked := request.headers.get("Access-Control-Request-Headers"):
        headers["Access-Control-Allow-Headers"] = asked
    return web.Response(status=204, headers=headers)


async def add_cors_headers(request: web.Request, response: web.StreamResponse) -> None:
    """Lets pages of allowed origins read the answer. Called when its headers are about to be sent."""
    origins = request.app[ORIGINS]
    if not origins:
        return
    if "*" not in origins:
        response.headers.add("Vary", "Origin")
    if (origin := _allowed_origin(request)) is not None:
        response.headers["Access-Control-Allow-Origin"] = origin
        response.headers["Access-Control-Expose-Headers"] = "X-Request-Id, Retry-After"


def _allowed_origin(request: web.Request) -> str | None:
    """What to allow: "*" or the request's own origin; None: nothing."""
    origins = request.app[ORIGINS]
    if "*" in origins:
        return "*"
    origin = request.headers.get("Origin")
    return origin if origin in origins else None
