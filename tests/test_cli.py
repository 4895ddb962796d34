"""The command line: help, mistakes, and how it ends."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve import cli
from jaxserve.commands import flags
from jaxserve.errors import WeightsError

ROOT = Path(__file__).parent.parent
COMMANDS = ["serve", "chat", "complete", "pull", "convert", "inspect"]


@pytest.mark.parametrize("argv", [["--help"], *[[command, "--help"] for command in COMMANDS]])
def test_help_explains_every_flag_within_the_width(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert "(default: None)" not in text
    assert "==SUPPRESS==" not in text


def test_every_flag_has_a_help_text():
    def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
        yield parser
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                for inner in action.choices.values():
                    yield from parsers(inner)

    for parser in parsers(cli.build_parser()):
        for action in parser._actions:
            assert action.help or isinstance(action, argparse._SubParsersAction), action


def test_help_needs_no_jax():
    program = (
        "import sys\n"
        "sys.modules['jax'] = sys.modules['flax'] = None\n"
        "from jaxserve.cli import main\n"
        "main(['serve', '--help'])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")
    assert "--max-num-batched-tokens" in done.stdout


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        ([], "COMMAND"),
        (["fly"], "invalid choice: 'fly'"),
        (["serve", "--port", "70000"], "'70000' is not a port from 0 to 65535"),
        (["serve", "--port", "http"], "not a port"),
        (["serve", "--max-num-seqs", "0"], "'0' is not a whole number of at least 1"),
        (["serve", "--max-num-queued-reqs", "-1"], "at least 0"),
        (["serve", "--kv-cache-memory", "lots"], "'lots' is no size: write it like 2GiB"),
        (["serve", "--kv-cache-memory", "0"], "no size"),
        (["serve", "--dtype", "float16"], "invalid choice"),
        (["serve", "--attention-backend", "cuda"], "invalid choice"),
        (["serve", "--shutdown-timeout", "nan"], "not a number of seconds"),
        (["serve", "--unknown"], "unrecognized arguments"),
        (["chat", "--max-tokens", "0"], "at least 1"),
        (["pull"], "NAME"),
        (["convert", "x"], "DST"),
    ],
)
def test_a_wrong_command_line_is_a_usage_error_with_status_2(argv, text, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("2GiB", 2**31), ("512MiB", 2**29), ("1.5G", 1_500_000_000), ("64kb", 64_000), ("4096", 4096),
     ("1 TiB", 2**40)],
)  # fmt: skip
def test_sizes_are_read_as_people_write_them(text, num_bytes):
    assert flags.size(text) == num_bytes


def test_an_error_is_one_line_and_status_1(monkeypatch, capsys):
    def fail(*args: object, **kwargs: object) -> None:
        raise WeightsError("nothing here")

    monkeypatch.setattr("jaxserve.weights.pull.pull", fail)
    assert cli.main(["pull", "x"]) == 1
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "error: nothing here\n")


def test_ctrl_c_is_status_130_without_a_traceback(monkeypatch, capsys):
    def interrupt(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxserve.weights.pull.pull", interrupt)
    assert cli.main(["pull", "x"]) == 130
    assert "Traceback" not in capsys.readouterr().err
