"""Talking in a terminal: reading what a person types, or a pipe, and printing text as it comes."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterator


def inputs(given: str | None, greeting: str) -> Iterator[str]:
    """What the person says: `given` alone, all of a piped stdin as one text, or line after line.

    Ctrl-D at the prompt ends it, Ctrl-C drops the line.
    """
    if given is not None:
        yield given
        return
    if not is_conversation(given):
        if text := sys.stdin.read().strip("\n"):
            yield text
        return
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401  (makes input() edit lines and remember them)
    print(greeting, file=sys.stderr)
    while True:
        try:
            line = input("> ")
        except EOFError:
            print(file=sys.stderr)
            return
        except KeyboardInterrupt:
            print("\n(Ctrl-D leaves)", file=sys.stderr)
            continue
        if line.strip():
            yield line


def is_conversation(given: str | None) -> bool:
    """Whether a person types line after line, so that a mistake should not end it all."""
    return given is None and sys.stdin.isatty()


def show(pieces: Generator[str]) -> str:
    """Print an answer as it comes and return it. On a terminal Ctrl-C stops it and keeps what came."""
    texts: list[str] = []
    try:
        for piece in pieces:
            texts.append(piece)
            print(piece, end="", flush=True)
    except KeyboardInterrupt:
        if not sys.stdin.isatty():
            raise
        print(" (stopped)", end="", file=sys.stderr, flush=True)
    finally:
        pieces.close()  # ends the request now
        print(flush=True)
    return "".join(texts)
