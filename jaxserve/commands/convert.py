"""`jaxserve convert`: turn a model file into a checkpoint that loads fast."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxserve.commands.console import ConsoleProgress
from jaxserve.commands.flags import HelpFormatter, add_quantization


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "convert",
        help="convert a model to a checkpoint that loads fast",
        description="Convert a GGUF file or a Hugging Face folder to an orbax checkpoint folder that also\n"
        "holds config, tokenizer and chat template.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("src", metavar="SRC", help="GGUF file, folder, or the name of a pulled model")
    parser.add_argument("dst", metavar="DST", type=Path, help="folder to write")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), default="bfloat16", help="of the converted weights"
    )
    add_quantization(parser)
    parser.add_argument("--overwrite", action="store_true", help="replace a checkpoint that is there already")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from jaxserve.weights.convert import convert

    with ConsoleProgress() as progress:
        path = convert(
            args.src, args.dst, dtype=args.dtype, quantization=args.quantization, progress=progress,
            overwrite=args.overwrite,
        )  # fmt: skip
    print(path)
    return 0
