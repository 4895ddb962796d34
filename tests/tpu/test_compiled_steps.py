"""What XLA:TPU makes of the steps, by compiling them for a TPU that isn't there.

libtpu goes into a process of its own: it wants an environment of its own and leaves threads behind.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxserve.models.config import ModelConfig
from jaxserve.weights.model_files import open_model

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "tpu_report.py"
CONFIGS = ROOT / "tests" / "data" / "models"
MODELS = ("smollm2-135m", "gemma3-270m")
MB = 1_000_000

# Both kinds of step of both models on both chips. Samplers differ by vocabulary only: one model a chip.
RUNS = (
    (MODELS, ("v5e:2x2", "v6e:2x2"), ("decode", "prefill")),
    (MODELS[:1], ("v5e:2x2",), ("greedy", "random")),
    (MODELS[1:], ("v6e:2x2",), ("greedy", "random")),
)
CASES = [(m, t, p) for models, chips, programs in RUNS for m in models for t in chips for p in programs]
FORWARD = [case for case in CASES if case[2] in ("decode", "prefill")]
SAMPLERS = [case for case in CASES if case not in FORWARD]


@pytest.fixture(scope="module")
def figures() -> dict[tuple[str, str, str], dict[str, Any]]:
    """By (model, topology, program), as scripts/tpu_report.py gives them."""
    if importlib.util.find_spec("libtpu") is None:
        machine = f"{sys.platform} {platform.machine()}"
        pytest.skip(f"libtpu is not installed: the test extra has it on linux x86_64, this is {machine}")
    found = {}
    for models, chips, programs in RUNS:
        command = [sys.executable, str(SCRIPT), *(str(CONFIGS / f"{name}.json") for name in models)]
        command += ["--topologies", *chips, "--programs", *programs, "--json"]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]
        for line in done.stdout.splitlines():
            one = json.loads(line)
            found[one["model"], one["topology"], one["program"]] = one
    return found


# Twelve compilations: 90 s of one core, far more in wall time on a busy machine.
pytestmark = pytest.mark.timeout(1800)


@pytest.mark.parametrize("case", FORWARD, ids="-".join)
def test_a_step_updates_the_pool_and_the_slot_state_in_place(figures, case):
    one = figures[case]
    assert one["aliased"] >= one["pool"] + one["state"]


@pytest.mark.parametrize("case", FORWARD, ids="-".join)
def test_a_step_copies_no_pool_and_no_layers_weights(figures, case):
    one = figures[case]
    assert one["pool_moves"] == []
    assert one["weight_moves"] == []


@pytest.mark.parametrize("case", FORWARD, ids="-".join)
def test_a_steps_temporary_memory_is_that_of_activations(figures, case):
    # The widest activation of a chunk of 512 is [512, 4096] in float32, 8 MB; two of them may live at once.
    # One copy of the embedding comes on top where its rows are no whole lanes, see docs/tpu.md.
    one = figures[case]
    assert one["temporary"] <= 16 * MB + one["relaid_embedding"] * one["embedding"]


@pytest.mark.parametrize("case", FORWARD, ids="-".join)
def test_a_step_reads_no_layer_of_the_pool_whole(figures, case):
    # Counted as XLA counts, loop bodies once, so one layer's keys read or written whole would show as such.
    # A re-laid embedding is read and written three times over: to the chip, there, and back.
    one = figures[case]
    excess = one["counted"] - one["ideal_counted"] - 6 * one["relaid_embedding"] * one["embedding"]
    assert excess < one["layer_keys"]


@pytest.mark.parametrize("case", SAMPLERS, ids="-".join)
def test_sampling_takes_few_passes_over_the_logits_and_no_copy_of_the_state(figures, case):
    one = figures[case]
    logits = one["ideal_counted"]
    assert one["aliased"] >= one["state"]
    assert one["temporary"] <= 2 * logits
    assert one["counted"] <= 32 * logits  # all branches are counted: the rare exact search as well


@pytest.mark.parametrize("name", MODELS)
def test_the_configurations_compiled_here_are_those_of_the_real_models(name, smollm2_gguf, gemma3_gguf):
    files = open_model(str(smollm2_gguf if name == MODELS[0] else gemma3_gguf))
    try:
        real = files.config
    finally:
        files.close()
    assert ModelConfig.from_json(json.loads((CONFIGS / f"{name}.json").read_text())) == real


HLO = """\
%fused_computation.1 (param_0: bf16[2,64,256]) -> bf16[64,256] {
  ROOT %slice.1 = bf16[64,256]{1,0:T(8,128)(2,1)} slice(%param_0), slice={[0:1]}
}

ENTRY %main.1 (kv: bf16[2,64,256]) -> bf16[2,64,256] {
  %kv = bf16[2,64,256]{1,2,0:T(8,128)(2,1)} parameter(0)
  %copy.22 = bf16[2,64,256]{2,1,0:T(8,128)(2,1)} copy(%kv), backend_config={}
  %copy.23 = bf16[2,64,256]{2,1,0:T(8,128)(2,1)S(1)} copy(%kv)
  %copy-start = (bf16[64,256]{1,0:T(8,128)}, bf16[64,256]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%kv)
  %fusion.1 = bf16[64,256]{1,0:T(8,128)(2,1)} fusion(%kv), kind=kLoop, calls=%fused_computation.1
  %copy.24 = bf16[64,128]{1,0:T(8,128)(2,1)} copy(%kv)
}
"""


def test_copies_are_found_in_hlo_outside_of_fusions_and_off_the_chip(monkeypatch):
    for name, value in os.environ.items():
        monkeypatch.setenv(name, value)  # puts back what the script sets on import
    for name in ("TPU_SKIP_MDS_QUERY", "TPU_ACCELERATOR_TYPE", "TPU_WORKER_HOSTNAMES"):
        monkeypatch.setenv(name, "")
    spec = importlib.util.spec_from_file_location("tpu_report", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    report = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "tpu_report", report)
    spec.loader.exec_module(report)
    sizes = {64 * 256, 2 * 64 * 256}
    assert list(report.moves(HLO, sizes, report.MOVES)) == [
        "copy.22 = copy bf16[2,64,256]",
        "copy-start = copy-start bf16[64,256]",
    ]
    assert list(report.moves(HLO, sizes, ("fusion",))) == ["fusion.1 = fusion bf16[64,256]"]
