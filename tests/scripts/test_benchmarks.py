"""The load scripts: their statistics against brute force, and whole small runs against a fake server."""

from __future__ import annotations

import asyncio
import math
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from tests.server.running import CONFIG, RunningServer

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))  # where the scripts find each other

import bench_long_prompt
import bench_overload
import bench_prefix
import bench_serve
import load_client
import load_report
import load_server

BENCHMARKS = [bench_serve, bench_prefix, bench_long_prompt, bench_overload]
LONG = replace(CONFIG, max_model_len=4096, num_pages=4000, decode_buckets=(), prefill_buckets=())


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with RunningServer(config=LONG) as running:
        yield running


# Statistics.


@given(
    values=st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=60),
    share=st.sampled_from([0.0, 0.05, 0.25, 0.5, 0.9, 0.95, 0.99, 1.0]),
)
def test_a_percentile_is_the_least_value_that_so_many_do_not_exceed(values, share):
    enough = [v for v in values if sum(w <= v for w in values) >= share * len(values) - 1e-9]
    assert load_client.percentile(values, share) == min(enough)


def test_a_percentile_of_nothing_is_shown_as_a_dash():
    assert load_report.ms(load_client.percentile([], 0.5)) == "-"
    assert load_report.ratio(1.0, 0.0) == "-"


def test_times_are_shown_as_in_the_docs():
    shown = [load_report.ms(seconds) for seconds in (0.00123, 0.0996, 0.1, 1.2345)]
    assert shown == ["1.2 ms", "99.6 ms", "100 ms", "1,234 ms"]


def test_a_table_is_markdown():
    assert load_report.table(["a", "b"], [[1, "x"]]) == "| a | b |\n| --- | --- |\n| 1 | x |"


def test_times_to_the_first_token_and_between_tokens_are_those_of_text():
    answer = load_client.Answer(sent_s=1.0, token_times_s=[1.5, 1.75, 2.75])
    assert answer.ttft_s == 0.5
    assert answer.gaps == [(1.5, 1.75), (1.75, 2.75)]


def test_only_full_answers_count_for_throughput():
    full = load_client.Answer(num_output=6, token_times_s=[1.0])
    cut = load_client.Answer(num_output=100, error="the stream has no end")
    load = load_client.Load([full, cut], took_s=2.0)
    assert load.tokens_per_s == 3.0
    assert load.done == [full]


def test_errors_are_counted_and_refusals_can_be_left_out():
    answers = [load_client.Answer(status=429, error="full")] * 2 + [load_client.Answer(error="gone")] * 3
    assert load_client.errors(answers) == ["3 x gone", "2 x full"]
    assert load_client.errors(answers, but=frozenset({429})) == ["3 x gone"]


def test_arrivals_come_at_the_rate_that_was_asked_for():
    times = load_client.poisson(50.0, 100.0)
    assert times == sorted(times)
    assert times[0] >= 0
    assert times[-1] < 100.0
    assert abs(len(times) - 5000) < 5 * math.sqrt(5000)


def test_prompts_have_no_common_beginning_unless_they_are_made_to():
    one, other = load_client.Prompts(1).take(100), load_client.Prompts(2).take(100)
    assert one.split()[:3] != other.split()[:3]
    assert load_client.Prompts(1).take(100) == one
    assert load_client.Prompts(3).take(3, after="a system prompt").startswith("a system prompt ")
    assert len(one.split()) == 100


def test_metrics_are_read_without_prefix_and_model_name():
    text = (
        "# HELP x y\n"
        'jaxserve:num_preemptions_total{model_name="m"} 3.0\n'
        'jaxserve:admission_rejections_total{model_name="m",reason="queue_full"} 7.0\n'
        "process_resident_memory_bytes 2.097152e+06\n"
    )
    values = load_server.parse_metrics(text)
    assert values["num_preemptions_total"] == 3
    assert values['admission_rejections_total{reason="queue_full"}'] == 7
    assert load_server.resident_mib(values) == 2


def test_memory_is_flat_when_the_second_half_adds_little():
    samples = [bench_overload.Sample(10.0 + i / 2, 100.0 + min(i, 40)) for i in range(80)]
    assert bench_overload.quarters(samples, 10.0, 40.0) == [109.5, 129.5, 140.0, 140.0]
    assert bench_overload.growth([100, 130, 140, 150], 32.0) == []
    assert "grew by 40 MiB" in bench_overload.growth([100, 110, 130, 150], 32.0)[0]
    assert bench_overload.quarters(samples[:1], 10.0, 40.0) == [100.0] * 4


def test_refusals_that_the_server_counts_otherwise_are_a_complaint():
    key = 'admission_rejections_total{reason="queue_full"}'
    refused = [load_client.Answer(status=429, code="queue_full")] * 2
    assert bench_overload.miscounts(refused, {key: 5}, {key: 7}) == []
    assert bench_overload.miscounts(refused, {key: 5}, {key: 8})


# One request.


def complete(url: str, prompt: str, max_tokens: int) -> load_client.Answer:
    async def run() -> load_client.Answer:
        async with load_client.session() as http:
            return await load_client.complete(http, url, prompt, max_tokens)

    return asyncio.run(run())


def test_an_answer_has_its_tokens_and_what_the_cache_gave(server):
    first, second = (complete(server.url, "x" * 40, 5) for _ in range(2))
    assert (first.status, first.error, first.num_prompt, first.num_output) == (200, None, 40, 5)
    assert 1 <= len(first.token_times_s) <= 5  # a chunk brings what came since the last one
    assert first.sent_s < first.token_times_s[0] <= first.token_times_s[-1] <= first.ended_s
    assert (first.num_cached, second.num_cached) == (0, 36)


def test_a_refusal_is_an_error_with_its_code(server):
    answer = complete(server.url, "x" * 5000, 5)
    assert (answer.status, answer.code, answer.num_output) == (400, "context_length_exceeded", 0)
    assert answer.error is not None


def test_a_server_that_is_not_there_is_an_error():
    answer = complete("http://127.0.0.1:1", "x", 5)
    assert answer.status == 0
    assert answer.error is not None
    assert "Connect" in answer.error


def test_a_stream_that_breaks_is_an_error():
    with RunningServer() as running:
        running.runner.breaks = True
        answer = complete(running.url, "x", 5)
    assert answer.error is not None
    assert answer.error.startswith(("in the stream", "HTTP 500"))


def complete_from(stream: str, max_tokens: int) -> load_client.Answer:
    """One request to a server that answers with this text, whatever it is asked."""

    async def run() -> load_client.Answer:
        app = web.Application()
        app.router.add_post("/v1/completions", answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            async with load_client.session() as http:
                port = runner.addresses[0][1]
                return await load_client.complete(http, f"http://127.0.0.1:{port}", "x", max_tokens)
        finally:
            await runner.cleanup()

    async def answer(_: web.Request) -> web.Response:
        return web.Response(text=stream, content_type="text/event-stream")

    return asyncio.run(run())


TWO_TOKENS = """data: {"choices": [{"text": "a"}]}

: a comment

data: {"choices": [{"text": "b"}], "usage": null}

data: {"choices": [{"text": "", "finish_reason": "length"}]}

data: {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 2}}

"""
DONE = "data: [DONE]\n\n"


def test_chunks_without_text_are_no_tokens():
    answer = complete_from(TWO_TOKENS + DONE, 2)
    assert (answer.error, answer.num_prompt, answer.num_output, answer.num_cached) == (None, 7, 2, 0)
    assert len(answer.token_times_s) == 2


@pytest.mark.parametrize(
    ("stream", "max_tokens", "error"),
    [
        (TWO_TOKENS, 2, "the stream has no end"),
        (TWO_TOKENS + DONE, 3, "2 tokens in place of 3"),
        ('data: {"error": {"message": "on fire", "code": "failed"}}\n\n', 2, "in the stream: on fire"),
        ("data: {nonsense\n\n" + DONE, 2, "JSONDecodeError"),
    ],
)
def test_an_answer_that_is_not_whole_is_an_error(stream, max_tokens, error):
    assert (complete_from(stream, max_tokens).error or "").startswith(error)


# Whole runs.


def rows_of(text: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert all(len(row) == len(rows[0]) for row in rows)
    return [rows[0], *rows[2:]]


def test_throughput_has_a_row_for_each_number_of_clients(server, capsys):
    argv = ["--url", server.url, "--clients", "1", "3", "--prompt", "4", "--output", "6", "--rounds", "2"]
    assert bench_serve.main(argv) == 0
    header, *rows = rows_of(capsys.readouterr().out)
    assert [row[:3] for row in rows] == [["1", "as it runs", "2"], ["3", "as it runs", "6"]]
    assert all(float(row[header.index("tokens/s")]) > 0 for row in rows)
    assert not {"-", ""} & {row[header.index("TTFT p95")] for row in rows}


def test_a_server_that_fails_makes_the_status_1(capsys):
    with RunningServer() as running:
        running.runner.breaks = True
        assert bench_serve.main(["--url", running.url, "--short"]) == 1
    assert "error: " in capsys.readouterr().err


def test_a_shared_prompt_is_found_the_second_time(server, capsys):
    argv = ["--url", server.url, "--short", "--system", "60", "--question", "4"]
    assert bench_prefix.main(argv) == 0
    header, row = rows_of(capsys.readouterr().out)
    cached, num_prompt = map(int, row[header.index("cached of a prompt")].split(", ")[0].split(" of "))
    assert 0.7 * num_prompt < cached < num_prompt
    assert float(row[header.index("cached in all")]) > 0.7


def test_streams_go_on_while_a_long_prompt_comes_in(server, capsys):
    server.runner.step_s = 0.01  # or the streams end before the prompt is there
    try:
        assert bench_long_prompt.main(["--url", server.url, "--short", "--prompt", "300"]) == 0
    finally:
        server.runner.step_s = 0.0
    header, row = rows_of(capsys.readouterr().out)
    assert int(row[header.index("prompt")]) > 300
    assert not {"-", ""} & {row[header.index(name)] for name in ("before p95", "meanwhile p95", "longest")}


def test_overload_is_refused_and_counted(capsys):
    config = replace(CONFIG, max_num_queued=1)
    with RunningServer(config=config) as running:
        running.runner.step_s = 0.002
        argv = ["--url", running.url, "--seconds", "1.5", "--factor", "6", "--prompt", "4", "--output", "20"]
        status = bench_overload.main([*argv, "--capacity-requests", "4", "--slots", "4"])
    captured = capsys.readouterr()
    assert status == 0, captured.err
    _, *rows = rows_of(captured.out)
    figures = dict(rows)
    assert re.fullmatch(r"[1-9]\d* queue_full", figures["refused with 429"])
    assert re.fullmatch(r"\d+ - \d+ s", figures["Retry-After"])
    assert figures["other errors"] == "0"
    assert figures["resident memory, median of each quarter"].count(",") >= 3


# Servers of one's own.

FAKE_SERVER = """#!{python}
import signal, sys, time
open({notes!r}, "a").write(" ".join(sys.argv[1:]) + "\\n")
if "--fail" in sys.argv:
    sys.exit("error: no such model")
try:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())  # before anybody may stop it
    print("fake is ready at http://127.0.0.1:9; try:  curl x", flush=True)
    time.sleep(600)
finally:
    open({notes!r}, "a").write("stopped\\n")
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder whose interpreter is a fake server; `notes` says how it was called and that it was stopped."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(FAKE_SERVER.format(python=sys.executable, notes=str(tmp_path / "notes")))
    python.chmod(0o755)
    return tmp_path


def arguments(*argv: str) -> Any:
    return load_server.parse(load_server.make_parser("x"), ["--model", "some/model", *argv], {})


def test_servers_run_with_their_flags_and_are_stopped_whatever_happens(checkout):
    variants = [load_server.Variant(name, ("--a", name), checkout) for name in ("one", "two")]

    def measure() -> None:
        with load_server.serving(arguments(), variants) as served:
            assert [(s.name, s.url) for s in served] == [(n, "http://127.0.0.1:9") for n in ("one", "two")]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        measure()
    calls = (checkout / "notes").read_text().splitlines()
    start = "-m jaxserve serve some/model --port 0 --shutdown-timeout 5 --a"
    assert calls == [f"{start} one", f"{start} two", "stopped", "stopped"]


def test_a_server_that_does_not_start_is_an_error_and_the_others_are_stopped(checkout):
    variants = [load_server.Variant("good", (), checkout), load_server.Variant("bad", ("--fail",), checkout)]
    with pytest.raises(load_server.ServerError), load_server.serving(arguments(), variants):
        pass
    assert (checkout / "notes").read_text().splitlines()[-1] == "stopped"


def test_a_checkout_without_an_environment_is_an_error(tmp_path):
    variants = [load_server.Variant("x", (), tmp_path)]
    with (
        pytest.raises(load_server.ServerError, match="scripts/setup"),
        load_server.serving(arguments(), variants),
    ):
        pass


def test_short_runs_have_fewer_shapes_unless_told_otherwise(checkout):
    args = arguments("--short", "--", "--max-num-seqs", "7")
    variant = load_server.Variant("x", tuple(args.serve_flags), checkout)
    with load_server.serving(args, [variant]):
        pass
    (call, _) = (checkout / "notes").read_text().splitlines()
    assert call.endswith("--max-num-seqs 4 --max-num-batched-tokens 128 --max-num-seqs 7")


@pytest.mark.parametrize("benchmark", BENCHMARKS)
def test_a_script_explains_itself(benchmark, capsys):
    with pytest.raises(SystemExit) as caught:
        benchmark.main(["--help"])
    assert caught.value.code == 0
    assert "--short" in capsys.readouterr().out


def test_a_script_runs_from_anywhere(tmp_path):
    done = subprocess.run(
        [sys.executable, bench_serve.__file__, "--help"], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, "")
