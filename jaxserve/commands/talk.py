"""The flags that `chat` and `complete` have in common."""

from __future__ import annotations

import argparse
from typing import Any

from jaxserve.commands.flags import DEFAULT_MODEL, add_engine_flags, add_log_level, count, count_from_zero

SAMPLING = ("max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty",
            "presence_penalty", "frequency_penalty", "min_tokens")  # fmt: skip


def add_talk_flags(parser: argparse.ArgumentParser, *, max_tokens: int | None, prompt_help: str) -> None:
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default=DEFAULT_MODEL,
        help="model to run in this process; not used with --url",
    )
    parser.add_argument("--prompt", metavar="TEXT", help=prompt_help)
    remote = parser.add_argument_group("a server instead of a model in this process")
    remote.add_argument("--url", help="address of the server, like http://127.0.0.1:8000")
    remote.add_argument("--model-name", metavar="NAME", help="default: the first that the server lists")
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-tokens", type=count, default=max_tokens, metavar="N",
        help="longest answer" + ("; default: what the context leaves" if max_tokens is None else ""),
    )
    sampling.add_argument(
        "--temperature", type=float, metavar="T", help="0 is greedy; default: the model's, or 1"
    )
    sampling.add_argument("--top-p", type=float, metavar="P", help="default: the model's, or 1, off")
    sampling.add_argument("--top-k", type=int, metavar="K", help="default: the model's, or 0, off")
    sampling.add_argument("--min-p", type=float, metavar="P", help="default: the model's, or 0, off")
    sampling.add_argument("--seed", type=int, metavar="N", help="default: drawn for each answer")
    sampling.add_argument(
        "--repetition-penalty", type=float, metavar="X",
        help="of tokens that prompt or answer have; above 1 makes them less likely; default: the model's, or "
        "1, off",
    )
    sampling.add_argument(
        "--presence-penalty", type=float, metavar="X",
        help="of tokens that the answer has, from -2 to 2; default: 0, off",
    )
    sampling.add_argument(
        "--frequency-penalty", type=float, metavar="X",
        help="of tokens that the answer has, for each time, from -2 to 2; default: 0, off",
    )
    sampling.add_argument(
        "--min-tokens", type=count_from_zero, metavar="N", help="the answer ends no earlier; default: 0"
    )
    add_engine_flags(parser, max_num_seqs=1)
    add_log_level(parser)


def sampling_fields(args: argparse.Namespace) -> dict[str, Any]:
    """The request fields of those flags that were given."""
    return {name: value for name in SAMPLING if (value := getattr(args, name)) is not None}
