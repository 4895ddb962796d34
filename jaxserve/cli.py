"""The `jaxserve` command: reads the command line, runs one of the commands, tells errors in one line."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

import jaxserve
from jaxserve.commands import chat, complete, convert, inspect, pull, serve
from jaxserve.commands.flags import HelpFormatter
from jaxserve.errors import JaxserveError

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as shells have it


def build_parser() -> argparse.ArgumentParser:
    """The whole command line. Imports no jax, so that --help is quick."""
    parser = argparse.ArgumentParser(
        prog="jaxserve",
        description="Serve and run language models with JAX on TPU, GPU and CPU.",
        epilog="'jaxserve COMMAND --help' shows the flags of a command.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"jaxserve {jaxserve.__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (serve, chat, complete, pull, convert, inspect):
        command.add_parser(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status: 0, 1 for an error, 130 when interrupted."""
    args = build_parser().parse_args(argv)
    try:
        return args.run(args)
    except JaxserveError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # the reader of our output left, as in `jaxserve ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED
