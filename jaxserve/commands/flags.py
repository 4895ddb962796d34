"""Flags that several commands share, and how flags are read and shown."""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.engine.config import CPU_PREFILL_TOKENS, EngineConfig

if TYPE_CHECKING:
    from jaxserve.launch import LaunchOptions

DEFAULT_MODEL = "smollm2-135m"
_UNITS = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_BINARY_UNITS = {"ki": 1024, "mi": 1024**2, "gi": 1024**3, "ti": 1024**4}


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Help with room for the flags, and with the default of every flag that has one."""

    def __init__(self, prog: str, **kwargs: Any):
        super().__init__(prog, **{"max_help_position": 34, "width": 100, **kwargs})

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text, default = action.help or "", action.default
        if default is None or default is False or default is argparse.SUPPRESS or "%(default)" in text:
            return text
        return text + (" (default: %(default)s)" if not isinstance(default, list | bool) else "")


def size(text: str) -> int:
    """Bytes from "2GiB", "512MiB", "1.5G" or a plain number."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?i?)b?", text.strip().lower())
    unit = None if match is None else (_UNITS | _BINARY_UNITS).get(match[2])
    if match is None or unit is None or (num_bytes := int(float(match[1]) * unit)) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write it like 2GiB, 512MiB or 1000000")
    return num_bytes


def count(text: str) -> int:
    """A whole number of at least 1."""
    return _number(text, int, 1, None, "a whole number of at least 1")


def count_from_zero(text: str) -> int:
    """A whole number of at least 0."""
    return _number(text, int, 0, None, "a whole number of at least 0")


def port(text: str) -> int:
    return _number(text, int, 0, 65535, "a port from 0 to 65535")


def seconds(text: str) -> float:
    return _number(text, float, 0, 86400, "a number of seconds from 0 to 86400")


def positive_seconds(text: str) -> float:
    return _number(text, float, 1e-3, 86400, "a number of seconds from 0.001 to 86400")


def _number(text: str, kind: type, lowest: float, highest: float | None, what: str) -> Any:
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or not value >= lowest or (highest is not None and value > highest):
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def add_engine_flags(parser: argparse.ArgumentParser, *, max_num_seqs: int) -> None:
    """Flags of everything that runs an engine in this process; `launch_options` reads them."""
    model = parser.add_argument_group("model")
    model.add_argument(
        "--max-model-len", type=count, metavar="TOKENS",
        help="longest prompt and answer together; default: what the model and the memory allow",
    )
    model.add_argument(
        "--dtype", choices=("auto", "bfloat16", "float32"), default="auto",
        help="of weights and activations",
    )
    add_quantization(model)
    model.add_argument(
        "--kv-cache-dtype", choices=("auto", "int8"), default="auto",
        help="of keys and values; auto: as --dtype; int8 takes about half of bfloat16's memory, at a little "
        "less precision (docs/models.md)",
    )
    model.add_argument(
        "--chat-template", type=Path, metavar="FILE",
        help="jinja2 template for chats, in place of the model's own; or the name of one of these, to use it "
        "for every chat",
    )
    model.add_argument(
        "--generation-config", default="auto", metavar="FROM",
        help="where defaults of temperature, top_p and so on come from: auto, the model's own "
        "generation_config.json; none; or a folder with such a file",
    )
    batching = parser.add_argument_group("batching and memory")
    batching.add_argument(
        "--max-num-seqs", type=count, default=max_num_seqs, metavar="N",
        help="requests that run at the same time",
    )
    batching.add_argument(
        "--max-num-batched-tokens", type=count, metavar="TOKENS",
        help="prompt tokens of one step; longer prompts are prefilled in such chunks "
        f"(default: {CPU_PREFILL_TOKENS} on a CPU, {EngineConfig.max_prefill_tokens} elsewhere)",
    )
    batching.add_argument(
        "--max-num-queued-reqs", type=count_from_zero, default=EngineConfig.max_num_queued, metavar="N",
        help="requests that may wait; beyond that the answer is 429",
    )
    batching.add_argument(
        "--block-size", type=count, default=EngineConfig.page_size, metavar="TOKENS",
        help="positions of one page of the KV cache",
    )
    batching.add_argument(
        "--kv-cache-memory", type=size, metavar="SIZE",
        help="memory of the KV cache, like 2GiB; default: a part of what is free",
    )
    batching.add_argument(
        "--max-queued-tokens", type=count, default=EngineConfig.max_queued_tokens, metavar="TOKENS",
        help="prompt tokens that may wait; beyond that the answer is 429",
    )
    batching.add_argument(
        "--queue-timeout", type=positive_seconds, metavar="SECONDS",
        help="how long a request may wait for its turn; then the answer is 504 (default: for ever)",
    )
    batching.add_argument(
        "--scheduling-policy", choices=("fcfs", "priority"), default=EngineConfig.scheduling_policy,
        help="fcfs: requests go in the order they come; priority: by their field 'priority', lower first, "
        "where ten seconds of waiting make up for one level",
    )
    batching.add_argument(
        "--admission", choices=("optimistic", "reserve"), default=EngineConfig.admission,
        help="optimistic: begin requests on an estimate of their length, and preempt when pages run out; "
        "reserve: hold the pages of the longest answer, never preempt",
    )
    batching.add_argument(
        "--enable-prefix-caching", action=argparse.BooleanOptionalAction,
        default=EngineConfig.enable_prefix_caching,
        help="keep the pages of prompts and answers for prompts that begin alike (default: on)",
    )
    batching.add_argument(
        "--deterministic", action="store_true",
        help="answer a request with the same bits whatever else runs; docs/determinism.md says at what cost",
    )
    batching.add_argument(
        "--decode-steps", type=count, default=EngineConfig.decode_steps, metavar="K",
        help="tokens of each stream that one launch decodes while nobody waits: fewer gaps between steps, "
        "but tokens come K at a time and new requests wait for the launch at hand",
    )
    batching.add_argument(
        "--max-logprobs", type=count_from_zero, default=EngineConfig.max_logprobs, metavar="N",
        help="most of the likeliest tokens that a request may ask for at each place",
    )
    device = parser.add_argument_group("device")
    device.add_argument(
        "--step-timeout", type=positive_seconds, default=EngineConfig.step_timeout_s, metavar="SECONDS",
        help="a step that takes longer is logged and counted",
    )
    for name, what in (("attention", "paged attention"), ("linear", "dense layers")):
        device.add_argument(
            f"--{name}-backend", choices=("auto", "native", "xla"), default="auto",
            help=f"kernels for {what}; asking for one that can't run is an error",
        )
    device.add_argument(
        "--compile-cache", type=Path, metavar="DIR",
        help="where compiled steps are kept for the next start; default: in the user's cache folder",
    )


def launch_options(args: argparse.Namespace, **more: Any) -> LaunchOptions:
    """What the flags say, and `more` that only the command itself has flags for."""
    from jaxserve.launch import LaunchOptions

    return LaunchOptions(
        model=args.model,
        dtype=args.dtype,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        max_model_len=args.max_model_len,
        max_num_seqs=args.max_num_seqs,
        max_num_batched_tokens=args.max_num_batched_tokens,
        max_num_queued_reqs=args.max_num_queued_reqs,
        block_size=args.block_size,
        kv_cache_memory=args.kv_cache_memory,
        max_queued_tokens=args.max_queued_tokens,
        queue_timeout=args.queue_timeout,
        step_timeout=args.step_timeout,
        scheduling_policy=args.scheduling_policy,
        admission=args.admission,
        enable_prefix_caching=args.enable_prefix_caching,
        deterministic=args.deterministic,
        decode_steps=args.decode_steps,
        max_logprobs=args.max_logprobs,
        attention_backend=args.attention_backend,
        linear_backend=args.linear_backend,
        compile_cache=args.compile_cache,
        chat_template=args.chat_template,
        generation_config=args.generation_config,
        **more,
    )


def add_quantization(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--quantization", choices=("int8", "int8-channel"),
        help="keep dense weights in int8: with a scale for 32 of them, or for each output channel; "
        "default: as the model is converted, floats where it isn't",
    )


def add_log_level(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), default="warning",
        help="of what goes to stderr; debug includes a line for each HTTP request",
    )
