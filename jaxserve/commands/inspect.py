"""`jaxserve inspect`: what a model is made of, and whether it would load."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from jaxserve.commands.flags import HelpFormatter

if TYPE_CHECKING:
    from jaxserve.weights.inspection import Inspection

LABEL_WIDTH, TEMPLATE_WIDTH = 15, 80


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "inspect",
        help="show what a model is made of, and whether it would load",
        description="Show what a model's files say of it, and whether and why not it would load, without\n"
        "loading tensors. The exit status is 1 for a model that would not load.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("model", metavar="MODEL", help="GGUF file, folder, or the name of a pulled model")
    parser.add_argument("--json", action="store_true", help="all of it as one JSON object")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from jaxserve.weights.inspection import inspect_model

    found = inspect_model(args.model)
    if args.json:
        print(json.dumps(found.to_json(), indent=2, ensure_ascii=False))
    else:
        for label, text in _rows(found):
            print(f"{label:{LABEL_WIDTH}}{text}")
    return 0 if found.would_load else 1


def _rows(found: Inspection) -> Iterator[tuple[str, str]]:
    from jaxserve.weights.inspection import rope_in_words, windows_in_words

    yield "model", f"{found.path} ({found.format})"
    if found.architecture is not None:
        yield "architecture", found.architecture
    yield "family", found.family or "none of those supported"
    if found.parameters is not None and found.nbytes is not None:
        yield "parameters", f"{found.parameters:,} in {_size(found.nbytes)}"
    for dtype, one in found.types.items():
        share = f"{one.tensors} tensor{'s'[: one.tensors != 1]}, {_size(one.nbytes)}"
        yield f"  {dtype}", f"{share}, {8 * one.nbytes / one.values:.2f} bits a value"
    if found.quantization is not None:
        yield "quantization", f"{found.quantization}, in which it is served"
    if (config := found.config) is not None:
        yield "context", f"{config.max_position} tokens"
        yield "layers", f"{config.num_layers} of width {config.hidden_size}"
        if (moe := config.moe) is None:
            yield "feed-forward", f"width {config.intermediate_size}"
        else:
            shared = f", and a shared one of {moe.shared_size}" if moe.shared_size else ""
            experts = f"{moe.num_active} of {moe.num_experts} experts a token, of width {moe.expert_size}"
            yield "feed-forward", experts + shared
        heads = f"{config.num_heads} heads of {config.head_dim}, {config.num_kv_heads} for keys and values"
        yield "attention", heads
        yield "window", windows_in_words(config)
        yield "rope", rope_in_words(config)
    if found.tokenizer is not None:
        yield "tokenizer", f"{found.tokenizer.kind}; {found.tokenizer.size} tokens"
        yield "chat template", _template(found.chat_templates)
    yield "would load", "yes" if found.would_load else "no"
    for problem in found.problems:
        yield "  because", problem


def _template(sources: dict[str, str]) -> str:
    if not sources:
        return "none: a base model"
    names = "" if list(sources) == ["default"] else f"{', '.join(sources)}; "
    first = next(iter(sources.values())).strip().partition("\n")[0]
    return names + (first if len(first) <= TEMPLATE_WIDTH else first[:TEMPLATE_WIDTH] + "...")


def _size(nbytes: int) -> str:
    for unit, scale in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if nbytes >= scale:
            return f"{nbytes / scale:.1f} {unit}"
    return f"{nbytes} bytes"
