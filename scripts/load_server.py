"""Servers to measure: started for one script and stopped with it, or one that runs already."""

from __future__ import annotations

import argparse
import asyncio
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
from load_report import fail_on, show

ROOT = Path(__file__).resolve().parent.parent
READY = re.compile(r" is ready at (http://[^;\s]+)")
START_LIMIT_S = 1800  # a cold compilation on a small machine
STOP_LIMIT_S = 60
SHORT_FLAGS = ("--max-num-seqs", "4", "--max-num-batched-tokens", "128")  # few shapes to compile


class ServerError(Exception):
    """A server could not be started or asked; the text says what it said."""


@dataclass(frozen=True)
class Variant:
    """One way to serve: `flags` of `jaxserve serve`, from the checkout at `root`."""

    name: str
    flags: tuple[str, ...] = ()
    root: Path = ROOT

    def command(self, model: str, *flags: str) -> list[str]:
        """`flags` are defaults: the variant's own come after them."""
        own = self.root / ".venv" / "bin" / "python"
        python = sys.executable if self.root == ROOT else str(own)
        server = [python, "-m", "jaxserve", "serve", model, "--port", "0", "--shutdown-timeout", "5"]
        return [*server, *flags, *self.flags]


@dataclass(frozen=True)
class Served:
    name: str
    url: str


# (arguments, servers) -> the rows of the table, and what went wrong
Measure = Callable[
    [argparse.Namespace, list[Served]], Coroutine[Any, Any, tuple[list[list[object]], list[str]]]
]


def make_parser(doc: str) -> argparse.ArgumentParser:
    """With --url, --model, --short, and flags for the servers after `--`."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--url", help="measure the server that runs there, and start none")
    parser.add_argument(
        "--model", default="smollm2-135m", help="what to serve (default: %(default)s, from checkpoints/)"
    )
    parser.add_argument("--short", action="store_true", help="a run of seconds, to see that all works")
    parser.add_argument("serve_flags", nargs="*", metavar="-- FLAG", help="more flags of jaxserve serve")
    return parser


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None, short: dict) -> argparse.Namespace:
    """The arguments; `short` are the defaults that --short puts in place."""
    argv = sys.argv[1:] if argv is None else argv
    if "--short" in argv:
        parser.set_defaults(**short)
    return parser.parse_args(argv)


def run(
    args: argparse.Namespace, variants: Sequence[Variant], measure: Measure, columns: Sequence[str]
) -> int:
    """Serve the variants, measure them, print the table. The exit status is 1 if anything went wrong."""
    try:
        with serving(args, variants) as servers:
            rows, problems = asyncio.run(measure(args, servers))
    except ServerError as error:
        return fail_on([str(error)])
    show(columns, rows)
    return fail_on(problems)


@contextmanager
def serving(args: argparse.Namespace, variants: Sequence[Variant]) -> Iterator[list[Served]]:
    """All variants, each a process of its own that waits on a free port, or what is at `args.url`.

    Servers that are not asked do nothing, so they can be measured in turns. Raises ServerError.
    """
    if args.url:
        yield [Served("as it runs", args.url.rstrip("/"))]
        return
    with ExitStack() as stack:
        model = str(kept if (kept := ROOT / "checkpoints" / args.model).exists() else args.model)
        before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that no server is left
        stack.callback(signal.signal, signal.SIGTERM, before)
        served = []
        for variant in variants:
            command = variant.command(model, *(SHORT_FLAGS if args.short else ()))
            print(f"{variant.name}: {' '.join(command[1:])}", file=sys.stderr)
            url = stack.enter_context(_process(command, variant.root))
            served.append(Served(variant.name, url))
        yield served


@contextmanager
def _process(command: Sequence[str], folder: Path) -> Iterator[str]:
    """The URL of a server that is ready. What it says goes where our own messages go."""
    try:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=folder)
    except OSError as error:
        raise ServerError(f"{command[0]}: {error.strerror}; run scripts/setup there") from error
    late = threading.Timer(START_LIMIT_S, process.kill)
    late.start()
    try:
        assert process.stdout is not None
        ready = READY.search(process.stdout.readline())
        late.cancel()
        if ready is None:
            raise ServerError("the server did not start; its messages say why")
        yield ready[1]
    finally:
        late.cancel()
        process.terminate()
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def metrics(http: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """What /metrics says: "name" or "name{label}" without the prefix and the model's name, and its value."""
    async with http.get(url + "/metrics", headers={"Accept": "text/plain"}) as response:
        text = await response.text()
        if response.status != 200:
            raise ServerError(f"{url}/metrics answers {response.status}: {text[:200]}")
    return parse_metrics(text)


def parse_metrics(text: str) -> dict[str, float]:
    values = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        name, _, value = line.rpartition(" ")
        name, _, labels = name.partition("{")
        rest = [label for label in labels.rstrip("}").split(",") if label and "model_name=" not in label]
        key = name.rpartition(":")[2] + ("{" + ",".join(rest) + "}" if rest else "")
        values[key] = float(value)
    return values


def resident_mib(values: dict[str, float]) -> float:
    return values["process_resident_memory_bytes"] / 2**20
