"""`jaxserve chat`: talk with a model in the terminal."""

from __future__ import annotations

import argparse
import sys
from contextlib import closing

from jaxserve.commands.backend import open_backend
from jaxserve.commands.flags import HelpFormatter
from jaxserve.commands.talk import add_talk_flags, sampling_fields
from jaxserve.commands.terminal import inputs, is_conversation, show
from jaxserve.errors import JaxserveError


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "chat",
        help="talk with a model in the terminal",
        description="Talk with a model. Ctrl-C stops an answer, Ctrl-D leaves.\n"
        "Piped input is one message: its answer is printed, and that is all.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--system-prompt", metavar="TEXT", help="what the model is told first")
    add_talk_flags(parser, max_tokens=None, prompt_help="one message, instead of a conversation")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with closing(open_backend(args)) as backend:
        messages = []
        if args.system_prompt is not None:
            messages.append({"role": "system", "content": args.system_prompt})
        for text in inputs(args.prompt, "Ctrl-C stops an answer, Ctrl-D leaves."):
            messages.append({"role": "user", "content": text})
            body = {"messages": messages, **sampling_fields(args)}
            try:
                answer = show(backend.stream("chat/completions", body))
            except JaxserveError as error:
                if not is_conversation(args.prompt):
                    raise
                print(f"error: {error}", file=sys.stderr)
                messages.pop()
                continue
            messages.append({"role": "assistant", "content": answer})
    return 0
