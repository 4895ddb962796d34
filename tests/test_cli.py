from __future__ import annotations

import argparse
import io
import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import threading
import types
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxserve import cli
from jaxserve.commands import flags
from jaxserve.commands.backend import RemoteBackend
from jaxserve.commands.console import ConsoleProgress
from jaxserve.commands.serve import example
from jaxserve.engine.config import EngineConfig
from jaxserve.engine.engine import Engine
from jaxserve.errors import JaxserveError, WeightsError
from tests.fakes import FakeModel
from tests.server.running import CONFIG, PacedRunner, RunningServer, served_model

ROOT = Path(__file__).parent.parent
COMMANDS = ["serve", "chat", "complete", "pull", "convert"]


@pytest.fixture(scope="module")
def remote() -> Iterator[RunningServer]:
    with RunningServer() as running:
        yield running


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def fake_launch(monkeypatch) -> Iterator[types.ModuleType]:
    """A jaxserve.launch that loads a fake model; `options` is what it was asked for."""
    launch = types.ModuleType("jaxserve.launch")

    class LaunchOptions:
        def __init__(self, **fields: Any):
            launch.options = fields  # type: ignore[attr-defined]

    def load_engine(options: LaunchOptions, *, deliver: Any, progress: Any) -> types.SimpleNamespace:
        progress("loading", 0, 2)
        progress("loading", 2, 2)
        model = served_model()
        runner = launch.runner = PacedRunner(CONFIG, FakeModel())  # type: ignore[attr-defined]
        engine = launch.engine = Engine(CONFIG, runner, model.tokenizer, deliver=deliver)  # type: ignore[attr-defined]
        engine.start()
        return types.SimpleNamespace(
            engine=engine, tokenizer=model.tokenizer, chat_template=model.chat_template, config=CONFIG,
            model_name="fake-model", vocab_size=model.vocab_size, compilations_after_warmup=lambda: 0,
        )  # fmt: skip

    launch.LaunchOptions, launch.load_engine = LaunchOptions, load_engine  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "jaxserve.launch", launch)
    yield launch
    if hasattr(launch, "engine"):
        launch.engine.stop()


# Help and mistakes.


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


# pull and convert.


def test_pull_prints_where_the_model_is(monkeypatch, capsys):
    def pull(name: str, dest_dir: Path, progress: Any) -> Path:
        progress(f"fetching {name}", 5_000_000, 10_000_000)
        progress(f"fetching {name}", 10_000_000, 10_000_000)
        return dest_dir / f"{name}.gguf"

    monkeypatch.setattr("jaxserve.weights.pull.pull", pull)
    assert cli.main(["pull", "smollm2-135m", "--dest", "models"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "models/smollm2-135m.gguf\n"
    assert captured.err == "fetching smollm2-135m: 5/10 MB\nfetching smollm2-135m: 10/10 MB\n"


def test_convert_passes_its_flags_on(monkeypatch, capsys):
    seen: dict[str, Any] = {}

    def convert(src: str, dst: Path, **kwargs: Any) -> Path:
        kwargs.pop("progress")
        seen.update(src=src, dst=dst, **kwargs)
        return dst

    monkeypatch.setattr("jaxserve.weights.convert.convert", convert)
    assert cli.main(["convert", "a.gguf", "out", "--dtype", "float32", "--overwrite"]) == 0
    assert seen == {"src": "a.gguf", "dst": Path("out"), "dtype": "float32", "overwrite": True}
    assert capsys.readouterr().out == "out\n"


def test_progress_without_a_terminal_is_a_line_at_the_begin_and_at_the_end(capsys):
    with ConsoleProgress() as progress:
        for done in range(11):
            progress("compiling", done, 10)
        progress("compiling", 10, 10)
    assert capsys.readouterr().err == "compiling: 0/10\ncompiling: 10/10\n"


# chat and complete.


def alone(path: str, server: RunningServer, **body: Any) -> str:
    _, answer = server.post(path, body)
    choice = answer["choices"][0]
    return choice["text"] if "text" in choice else choice["message"]["content"]


def test_complete_asks_a_server_and_prints_what_it_answers(remote, capsys):
    argv = ["complete", "--url", remote.url, "--prompt", "hello", "--max-tokens", "9", "--seed", "3"]
    assert cli.main(argv) == 0
    expected = alone("/v1/completions", remote, prompt="hello", max_tokens=9, seed=3)
    assert capsys.readouterr().out == expected + "\n"


def test_piped_input_is_one_message(remote, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    argv = ["chat", "--url", remote.url + "/v1", "--max-tokens", "9", "--seed", "3"]
    assert cli.main([*argv, "--system-prompt", "Be kind."]) == 0
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "two\nlines"}]
    expected = alone("/v1/chat/completions", remote, messages=messages, max_tokens=9, seed=3)
    assert capsys.readouterr().out == expected + "\n"


def test_a_conversation_carries_its_answers_on(remote, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", Terminal())
    lines = iter(["one", "  ", KeyboardInterrupt(), "two", EOFError()])

    def typed(prompt: str) -> str:
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return line

    monkeypatch.setattr("builtins.input", typed)
    argv = ["chat", "--url", remote.url, "--max-tokens", "5", "--seed", "1", "--model-name", "second/name"]
    assert cli.main(argv) == 0
    first, second = capsys.readouterr().out.splitlines()
    fields = {"max_tokens": 5, "seed": 1}
    user = lambda text: {"role": "user", "content": text}
    assert first == alone("/v1/chat/completions", remote, messages=[user("one")], **fields)
    said = [user("one"), {"role": "assistant", "content": first}, user("two")]
    assert second == alone("/v1/chat/completions", remote, messages=said, **fields)


def test_a_mistake_does_not_end_a_conversation(remote, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", Terminal())
    lines = iter(["refuse me", "hello"])

    def typed(prompt: str) -> str:
        if (line := next(lines, None)) is None:
            raise EOFError
        return line

    monkeypatch.setattr("builtins.input", typed)
    assert cli.main(["chat", "--url", remote.url, "--max-tokens", "5", "--seed", "1"]) == 0
    captured = capsys.readouterr()
    messages = [{"role": "user", "content": "hello"}]
    expected = alone("/v1/chat/completions", remote, messages=messages, max_tokens=5, seed=1)
    assert captured.out.split() == expected.split()
    assert "error: " in captured.err


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["complete", "--prompt", "x", "--temperature", "-1"], "400: 'temperature' must be at least 0"),
        (["complete", "--prompt", "x", "--model-name", "gpt-4"], "404: The model 'gpt-4' does not exist"),
        (["chat", "--prompt", "refuse me"], "400:"),
    ],
)
def test_what_a_server_refuses_is_one_line(remote, argv, text, capsys):
    assert cli.main([*argv, "--url", remote.url]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert text in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "ftp://x", "http://", "http://x:port"])
def test_a_server_that_is_not_there_is_one_line(url, capsys):
    assert cli.main(["chat", "--url", url, "--prompt", "x"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("error: ")
    assert err.count("\n") == 1


def test_an_error_in_the_middle_of_a_stream_is_an_error():
    with RunningServer() as running:
        running.runner.step_s = 0.01
        pieces = RemoteBackend(running.url, None).stream("completions", {"prompt": "x", "max_tokens": 99})
        next(pieces)
        running.runner.breaks = True
        with pytest.raises(JaxserveError, match="failed"):
            list(pieces)


def test_leaving_a_remote_answer_ends_the_request(remote):
    remote.runner.step_s = 0.02
    pieces = RemoteBackend(remote.url, None).stream("completions", {"prompt": "x", "max_tokens": 200})
    next(pieces)
    pieces.close()
    remote.runner.step_s = 0.0
    remote.wait_idle(1.0)


def test_without_a_url_the_engine_runs_in_this_process(fake_launch, remote, capsys):
    argv = ["chat", "some-model", "--prompt", "hello", "--max-tokens", "9", "--seed", "3"]
    assert cli.main(argv) == 0
    messages = [{"role": "user", "content": "hello"}]
    expected = alone("/v1/chat/completions", remote, messages=messages, max_tokens=9, seed=3)
    assert capsys.readouterr().out == expected + "\n"
    assert fake_launch.options["model"] == "some-model"
    assert fake_launch.engine.stats().state == "dead"


def test_a_local_mistake_is_the_same_error_as_at_a_server(fake_launch, capsys):
    assert cli.main(["complete", "--prompt", "x", "--top-p", "7"]) == 1
    assert "error: 'top_p' must be at most 1, got 7" in capsys.readouterr().err


def test_ctrl_c_stops_a_local_answer_and_the_conversation_goes_on(fake_launch, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", Terminal())
    lines = iter(["one", "two"])

    def typed(prompt: str) -> str:
        line = next(lines, None)
        if line is None:
            raise EOFError
        if line == "one":
            fake_launch.runner.step_s = 0.02
            threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        else:
            fake_launch.runner.step_s = 0.0
        return line

    monkeypatch.setattr("builtins.input", typed)
    assert cli.main(["complete", "--max-tokens", "200", "--seed", "1"]) == 0
    captured = capsys.readouterr()
    first, second = captured.out.splitlines()
    assert 0 < len(first) < 200
    assert len(second) == 200
    assert "(stopped)" in captured.err


# serve.


def test_serve_flags_reach_the_launcher(fake_launch, monkeypatch, tmp_path):
    async def serve(options: Any, load: Any, **kwargs: Any) -> None:
        fake_launch.server_options = options
        fake_launch.loaded = load(lambda events: None)

    monkeypatch.setattr("jaxserve.server.lifecycle.serve", serve)
    argv = (
        "serve m --host 0.0.0.0 --port 0 --served-model-name a b --max-model-len 99 --max-num-seqs 3 "
        "--max-num-batched-tokens 77 --max-num-queued-reqs 5 --block-size 8 --kv-cache-memory 2GiB "
        f"--dtype float32 --attention-backend xla --linear-backend native --chat-template {tmp_path}/t "
        f"--shutdown-timeout 7 --compile-cache {tmp_path} --metrics-prefix x: --max-body-size 1MiB "
        "--no-enable-prefix-caching --admission reserve "
        "--max-queued-tokens 900 --queue-timeout 2.5 --scheduling-policy priority --step-timeout 9"
    )
    assert cli.main(argv.split()) == 0
    assert fake_launch.options == {
        "model": "m", "dtype": "float32", "max_model_len": 99, "max_num_seqs": 3,
        "max_num_batched_tokens": 77, "max_num_queued_reqs": 5, "block_size": 8,
        "kv_cache_memory": 2**31, "attention_backend": "xla", "linear_backend": "native",
        "compile_cache": tmp_path, "chat_template": tmp_path / "t", "enable_prefix_caching": False,
        "admission": "reserve", "max_queued_tokens": 900, "queue_timeout": 2.5,
        "scheduling_policy": "priority", "step_timeout": 9,
    }  # fmt: skip
    options = fake_launch.server_options
    assert (options.host, options.port, options.shutdown_timeout_s) == ("0.0.0.0", 0, 7)
    assert (options.metrics_prefix, options.max_body_bytes) == ("x:", 2**20)
    assert fake_launch.loaded.model.names == ("a", "b")


def test_serve_defaults_are_those_of_the_engine(fake_launch, monkeypatch):
    async def serve(options: Any, load: Any, **kwargs: Any) -> None:
        load(lambda events: None)

    monkeypatch.setattr("jaxserve.server.lifecycle.serve", serve)
    assert cli.main(["serve"]) == 0
    options = fake_launch.options
    assert options["model"] == "smollm2-135m"
    assert options["max_num_seqs"] == EngineConfig.max_num_seqs
    assert options["block_size"] == EngineConfig.page_size
    assert options["enable_prefix_caching"] is EngineConfig.enable_prefix_caching is True
    assert options["admission"] == EngineConfig.admission
    assert options["max_model_len"] is options["kv_cache_memory"] is options["compile_cache"] is None


SERVE = """
import sys, types
sys.path.insert(0, {root!r})
from jaxserve.engine.engine import Engine
from tests.server.running import CONFIG, PacedRunner, served_model

def load_engine(options, *, deliver, progress):
    model = served_model()
    engine = Engine(CONFIG, PacedRunner(CONFIG), model.tokenizer, deliver=deliver)
    engine.start()
    return types.SimpleNamespace(
        engine=engine, tokenizer=model.tokenizer, chat_template=model.chat_template, config=CONFIG,
        model_name="fake-model", vocab_size=model.vocab_size, compilations_after_warmup=lambda: 0,
    )

launch = types.ModuleType("jaxserve.launch")
launch.LaunchOptions, launch.load_engine = types.SimpleNamespace, load_engine
sys.modules["jaxserve.launch"] = launch
from jaxserve.cli import main
raise SystemExit(main(["serve", "--port", {port!r}]))
"""


def test_serve_says_in_one_line_where_it_is_with_a_curl_that_works_and_stops_on_ctrl_c():
    process = subprocess.Popen(
        [sys.executable, "-c", SERVE.format(root=str(ROOT), port="0")],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    line = process.stdout.readline()
    match = re.fullmatch(r"fake-model is ready at (http://127\.0\.0\.1:\d+); try:  (curl .*)\n", line)
    assert match
    url, curl = match[1], shlex.split(match[2])
    assert curl[1].startswith(url)
    header = dict([curl[curl.index("-H") + 1].split(": ")])
    request = urllib.request.Request(curl[1], curl[curl.index("-d") + 1].encode(), header)
    with urllib.request.urlopen(request, timeout=10) as response:
        assert json.load(response)["choices"][0]["message"]["content"]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in err


def test_serve_exits_with_an_error_by_itself_when_the_device_fails():
    program = SERVE.format(root=str(ROOT), port="0").replace(
        "PacedRunner(CONFIG)", "types.SimpleNamespace(launch=lambda plan: 1 / 0)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    url = process.stdout.readline().partition(" at ")[2].partition(";")[0]
    request = urllib.request.Request(
        f"{url}/v1/completions", b'{"prompt": "x"}', {"Content-Type": "application/json"}
    )
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(request, timeout=10)
    assert caught.value.code == 500
    _, err = process.communicate(timeout=10)
    assert process.returncode == 1
    last = err.strip().splitlines()[-1]
    assert last == "error: the engine has failed: ZeroDivisionError: division by zero; start the server again"


def test_a_port_in_use_is_one_line_and_comes_before_the_model_is_loaded(remote):
    program = SERVE.format(root=str(ROOT), port=str(remote.port)).replace(
        "    model = served_model()\n", "    raise SystemError('loaded')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=20)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert f"port {remote.port} is in use" in done.stderr
    assert done.stderr.count("\n") == 1


def test_the_example_fits_the_model():
    chatty, base = served_model(), served_model(chat_template=None)
    assert "/v1/chat/completions" in example("http://x", chatty)
    assert "/v1/completions" in example("http://x", base)


def test_a_terminal_shows_a_bar(monkeypatch):
    leader, follower = pty.openpty()
    with os.fdopen(follower, "w") as terminal:
        monkeypatch.setattr("sys.stderr", terminal)
        monkeypatch.setenv("TERM", "xterm")
        with ConsoleProgress() as progress:
            progress("compiling", 3, 8)
            progress("compiling", 8, 8)
    shown = os.read(leader, 1 << 16)
    os.close(leader)
    assert b"compiling" in shown
    assert b"8/8" in shown
