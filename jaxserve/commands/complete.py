"""`jaxserve complete`: continue a text in the terminal."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing

from jaxserve.commands.backend import open_backend
from jaxserve.commands.flags import HelpFormatter
from jaxserve.commands.talk import add_talk_flags, sampling_fields
from jaxserve.commands.terminal import inputs, is_conversation, show
from jaxserve.errors import JaxserveError

DEFAULT_TOKENS = 128


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "complete",
        help="continue a text in the terminal",
        description="Continue texts, each line one. Ctrl-C stops an answer, Ctrl-D leaves.\n"
        "Piped input is one text: what follows it is printed, and that is all.",
        formatter_class=HelpFormatter,
    )
    add_talk_flags(parser, max_tokens=DEFAULT_TOKENS, prompt_help="one text, instead of a session")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with closing(open_backend(args)) as backend:
        for text in inputs(args.prompt, "Ctrl-C stops an answer, Ctrl-D leaves."):
            try:
                show(backend.stream("completions", {"prompt": text, **sampling_fields(args)}))
            except JaxserveError as error:
                if not is_conversation(args.prompt):
                    raise
                print(f"error: {error}", file=sys.stderr)
    return 0
