"""`jaxserve pull`: fetch a model by name."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxserve.commands.console import ConsoleProgress
from jaxserve.commands.flags import HelpFormatter


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "pull",
        help="fetch a model by name",
        description="Fetch a model: smollm2-135m, gemma3-270m, or org/name from the Hugging Face hub.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="alias, org/name, or org/name:file.gguf")
    parser.add_argument(
        "--dest", type=Path, default=Path("checkpoints"), metavar="DIR", help="where models are kept"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from jaxserve.weights.pull import pull

    with ConsoleProgress() as progress:
        path = pull(args.name, args.dest, progress=progress)
    print(path)
    return 0
