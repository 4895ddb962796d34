"""`jaxserve serve`: its flags, its one line, and its ends."""

from __future__ import annotations

import json
import re
import shlex
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from jaxserve import cli
from jaxserve.commands.serve import defaults_line, example
from jaxserve.engine.config import EngineConfig
from jaxserve.tokenizer.generation import GenerationDefaults
from tests.server.running import served_model

ROOT = Path(__file__).parents[2]


def test_serve_flags_reach_the_launcher(fake_launch, monkeypatch, tmp_path):
    async def serve(options: Any, load: Any, **kwargs: Any) -> None:
        fake_launch.server_options = options
        fake_launch.loaded = load(lambda events: None)

    monkeypatch.setattr("jaxserve.server.lifecycle.serve", serve)
    argv = (
        "serve m --host 0.0.0.0 --port 0 --served-model-name a b --max-model-len 99 --max-num-seqs 3 "
        "--max-num-batched-tokens 77 --max-num-queued-reqs 5 --block-size 8 --kv-cache-memory 2GiB "
        "--dtype float32 --quantization int8-channel --attention-backend xla --linear-backend native "
        f"--chat-template {tmp_path}/t "
        f"--shutdown-timeout 7 --compile-cache {tmp_path} --metrics-prefix x: --max-body-size 1MiB "
        "--no-enable-prefix-caching --admission reserve "
        "--max-queued-tokens 900 --queue-timeout 2.5 --scheduling-policy priority --step-timeout 9 "
        "--kv-cache-dtype int8 "
        "--decode-steps 4 --deterministic --max-logprobs 0 --pooling mean --generation-config none"
    )
    assert cli.main(argv.split()) == 0
    assert fake_launch.options == {
        "model": "m", "dtype": "float32", "quantization": "int8-channel", "kv_cache_dtype": "int8",
        "max_model_len": 99,
        "max_num_seqs": 3, "max_num_batched_tokens": 77, "max_num_queued_reqs": 5, "block_size": 8,
        "kv_cache_memory": 2**31, "attention_backend": "xla", "linear_backend": "native",
        "compile_cache": tmp_path, "chat_template": tmp_path / "t", "enable_prefix_caching": False,
        "admission": "reserve", "max_queued_tokens": 900, "queue_timeout": 2.5,
        "scheduling_policy": "priority", "step_timeout": 9, "decode_steps": 4,
        "deterministic": True, "max_logprobs": 0, "pooling": "mean", "generation_config": "none",
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
    assert options["generation_config"] == "auto"
    assert options["max_model_len"] is options["kv_cache_memory"] is options["compile_cache"] is None


SERVE = """
import sys, types
sys.path.insert(0, {root!r})
from jaxserve.engine.engine import Engine
from jaxserve.types import KernelsInUse, MemoryUse
from tests.server.running import CONFIG, PacedRunner, served_model

def load_engine(options, *, deliver, progress):
    model = served_model()
    engine = Engine(CONFIG, PacedRunner(CONFIG), model.tokenizer, deliver=deliver)
    engine.start()
    return types.SimpleNamespace(
        engine=engine, tokenizer=model.tokenizer, chat_template=model.chat_template, config=CONFIG,
        generation=model.generation, model_name="fake-model", vocab_size=model.vocab_size,
        compilations_after_warmup=lambda: 0, memory=MemoryUse(12_000_000, 2_000_000, 1000, 2000, 256, 7),
        kernels=KernelsInUse("xla", "xla", "XLA's: no compiler was there"),
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
    with urllib.request.urlopen(request, timeout=120) as response:
        assert json.load(response)["choices"][0]["message"]["content"]
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (0, "")
    assert "Traceback" not in err
    assert (
        "weights 12 MB; KV cache 2 MB: 2,000 tokens of 1.0 kB, enough for 7 requests of 256 tokens at a time"
        in err
    )
    assert "attention xla, linear layers xla; kernels: XLA's: no compiler was there" in err


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
        urllib.request.urlopen(request, timeout=120)
    assert caught.value.code == 500
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    last = err.strip().splitlines()[-1]
    assert last == "error: the engine has failed: ZeroDivisionError: division by zero; start the server again"


def test_a_port_in_use_is_one_line_and_comes_before_the_model_is_loaded(remote):
    program = SERVE.format(root=str(ROOT), port=str(remote.port)).replace(
        "    model = served_model()\n", "    raise SystemError('loaded')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("error: ")
    assert f"port {remote.port} is in use" in done.stderr
    assert done.stderr.count("\n") == 1


def test_defaults_of_sampling_are_said_in_one_line():
    generation = GenerationDefaults({"temperature": 0.6, "top_k": 20}, 1000, "m/generation_config.json")
    assert defaults_line(generation) == (
        "defaults of requests: temperature 0.6, top_k 20, max_tokens 1000 (by m/generation_config.json; "
        "--generation-config none for none)"
    )


def test_the_example_fits_the_model():
    chatty, base = served_model(), served_model(chat_template=None)
    assert "/v1/chat/completions" in example("http://x", chatty)
    assert "/v1/completions" in example("http://x", base)
