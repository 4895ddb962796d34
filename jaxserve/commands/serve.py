"""`jaxserve serve`: load a model, compile its steps, answer HTTP until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import ipaddress
import json
import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.commands.console import ConsoleProgress, set_up_logging
from jaxserve.commands.flags import (
    DEFAULT_MODEL,
    HelpFormatter,
    add_engine_flags,
    add_log_level,
    count,
    launch_options,
    port,
    seconds,
    size,
)
from jaxserve.engine.config import EngineConfig
from jaxserve.errors import EngineDiedError

if TYPE_CHECKING:
    from jaxserve.server.served import ServedModel
    from jaxserve.tokenizer.generation import GenerationDefaults
    from jaxserve.types import KernelsInUse, MemoryUse

EXIT_FAILED = 1
EXIT_INTERRUPTED = 130


def add_parser(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP, in the way of OpenAI's API",
        description="Load a model, compile its steps and serve it over HTTP until Ctrl-C.\n"
        "Ctrl-C lets running requests end; a second one exits at once.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument(
        "model", metavar="MODEL", nargs="?", default=DEFAULT_MODEL,
        help="name of a pulled or converted model, a checkpoint folder, a GGUF file or a folder of "
        "safetensors",
    )
    server = parser.add_argument_group("server")
    server.add_argument("--host", default="127.0.0.1", help="address to listen on; 0.0.0.0 for all")
    server.add_argument("--port", type=port, default=8000, help="0 picks a free one")
    server.add_argument(
        "--served-model-name", nargs="+", metavar="NAME",
        help="names that requests may use, the first is the one in answers; default: the model's",
    )
    server.add_argument(
        "--max-body-size", type=size, default="32MiB", metavar="SIZE", help="longest request body"
    )
    server.add_argument(
        "--max-header-size", type=size, default="8190", metavar="SIZE",
        help="longest request line and longest header, in bytes",
    )
    server.add_argument(
        "--shutdown-timeout", type=seconds, default=30.0, metavar="SECONDS",
        help="how long running requests may go on after Ctrl-C",
    )
    server.add_argument(
        "--metrics-prefix", default="jaxserve:", metavar="PREFIX",
        help="of the names at /metrics, for dashboards that expect another",
    )
    add_log_level(server)
    server.add_argument(
        "--log-requests", action="store_true",
        help="log the body of each request, prompts included (default: never)",
    )
    server.add_argument(
        "--tool-call-parser", choices=("auto", "hermes", "llama3_json", "mistral", "json"), default="auto",
        help="format in which the model writes tool calls; auto: as its chat template says",
    )
    server.add_argument(
        "--reasoning-parser", choices=("auto", "none", "think"), default="auto",
        help="think: what stands between <think> tags is given as reasoning_content; auto: if the model "
        "knows these tags",
    )
    server.add_argument(
        "--pooling", choices=("last", "mean"), default=EngineConfig.pooling,
        help="what /v1/embeddings takes of a text: the hidden state of its last token, or the mean over all",
    )
    _add_security_flags(parser)
    add_engine_flags(parser, max_num_seqs=EngineConfig.max_num_seqs)
    parser.set_defaults(run=run)


def _add_security_flags(parser: argparse.ArgumentParser) -> None:
    security = parser.add_argument_group("security")
    security.add_argument(
        "--api-key", action="append", default=[], metavar="KEY",
        help="key that requests must carry as 'Authorization: Bearer KEY'; may be given several times. Other "
        "users of this machine see it in the list of processes: prefer a file or JAXSERVE_API_KEY, which "
        "holds keys with spaces between",
    )
    security.add_argument(
        "--api-key-file", type=Path, metavar="FILE", help="file of such keys, one a line; # begins a comment"
    )
    security.add_argument(
        "--max-requests-per-key", type=count, metavar="N",
        help="requests that one key may have under way, by the answers they ask for; beyond that it is 429",
    )
    security.add_argument(
        "--allowed-origins", nargs="+", default=[], metavar="ORIGIN",
        help="web pages that may use the server from a browser, like https://chat.example.org; * for all",
    )
    security.add_argument(
        "--ssl-certfile", type=Path, metavar="FILE", help="certificate chain in PEM: serve HTTPS"
    )
    security.add_argument(
        "--ssl-keyfile", type=Path, metavar="FILE",
        help="private key in PEM; default: it is in --ssl-certfile too",
    )


def run(args: argparse.Namespace) -> int:
    from jaxserve.commands.model import served_model
    from jaxserve.server.lifecycle import (
        Deliver,
        Loaded,
        ServerOptions,
        StoppedWhileLoading,
        serve,
    )
    from jaxserve.server.security import gather_keys

    set_up_logging(args.log_level)
    options = ServerOptions(
        host=args.host,
        port=args.port,
        max_body_bytes=args.max_body_size,
        metrics_prefix=args.metrics_prefix,
        shutdown_timeout_s=args.shutdown_timeout,
        access_log=args.log_level == "debug",
        log_requests=args.log_requests,
        api_keys=gather_keys(args.api_key, args.api_key_file, os.environ),
        max_requests_per_key=args.max_requests_per_key,
        allowed_origins=tuple(args.allowed_origins),
        max_header_bytes=args.max_header_size,
        ssl_certfile=args.ssl_certfile,
        ssl_keyfile=args.ssl_keyfile,
    )

    def load(deliver: Deliver) -> Loaded:
        from jaxserve.launch import load_engine

        with ConsoleProgress() as progress:
            chosen = launch_options(args, pooling=args.pooling)
            loaded = load_engine(chosen, deliver=deliver, progress=progress)
        model = served_model(
            loaded,
            args.served_model_name,
            tool_call_parser=args.tool_call_parser,
            reasoning_parser=args.reasoning_parser,
        )
        print(memory_line(loaded.memory), file=sys.stderr, flush=True)
        print(kernels_line(loaded.kernels), file=sys.stderr, flush=True)
        if loaded.generation:
            print(defaults_line(loaded.generation), file=sys.stderr, flush=True)
        return Loaded(
            model, loaded.engine, loaded.compilations_after_warmup, loaded.memory, loaded.kernels
        )  # fmt: skip

    def on_ready(url: str, model: ServedModel) -> None:
        has_keys = bool(options.api_keys)
        if not has_keys and not is_loopback(options.host):
            print(
                f"warning: whoever reaches {options.host} may use this server; set keys with --api-key-file",
                file=sys.stderr,
            )
        print(f"{model.name} is ready at {url}; try:  {example(url, model, has_keys)}", flush=True)

    def on_draining(num_open: int) -> None:
        print(
            f"\nstopping: {num_open} requests may run for {args.shutdown_timeout:g} s more; "
            "Ctrl-C again exits at once",
            file=sys.stderr,
        )

    try:
        asyncio.run(serve(options, load, on_ready=on_ready, on_draining=on_draining))
    except StoppedWhileLoading as stopped:
        print(f"\n{stopped}", file=sys.stderr, flush=True)
        os._exit(EXIT_INTERRUPTED)  # the loading thread is inside of the compiler and can't be joined
    except EngineDiedError as died:
        print(f"error: {died}", file=sys.stderr, flush=True)
        os._exit(EXIT_FAILED)  # tearing down a device that has failed may hang
    return 0


def kernels_line(kernels: KernelsInUse) -> str:
    """What attention and linear layers run on, and why not on the C++ kernels."""
    attention, linear, which = kernels
    return f"attention {attention}, linear layers {linear}; kernels: {which}"


def memory_line(memory: MemoryUse) -> str:
    """What the model takes, and how much fits."""
    return (
        f"weights {memory.weights_bytes / 1e6:,.0f} MB; KV cache {memory.kv_bytes / 1e6:,.0f} MB: "
        f"{memory.kv_tokens:,} tokens of {memory.kv_bytes_per_token / 1e3:,.1f} kB, enough for "
        f"{memory.num_full_requests:,} requests of {memory.max_model_len:,} tokens at a time"
    )


def defaults_line(generation: GenerationDefaults) -> str:
    """What requests get that do not say how to sample."""
    return (
        f"defaults of requests: {generation} (by {generation.source}; --generation-config none for none)"
    )


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def example(url: str, model: ServedModel, has_keys: bool = False) -> str:
    """A curl to paste: a chat where the model has a template, else a completion."""
    name, is_chat = model.name, model.chat_template is not None
    body: dict[str, object] = {"model": name}
    if is_chat:
        body["messages"] = [{"role": "user", "content": "Name three colours."}]
    else:
        body |= {"prompt": "The capital of France is", "max_tokens": 16}
    path = "/v1/chat/completions" if is_chat else "/v1/completions"
    key = " -H \"Authorization: Bearer $KEY\"" if has_keys else ""
    return (
        f"curl {url}{path}{key} -H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    )
