"""`jaxserve chat` and `jaxserve complete`, with a server and without."""

from __future__ import annotations

import io
import os
import signal
import threading
from typing import Any

import pytest

from jaxserve import cli
from jaxserve.commands.backend import RemoteBackend
from jaxserve.errors import JaxserveError
from tests.server.running import RunningServer


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


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
