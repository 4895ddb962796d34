from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

from jaxserve.errors import ConfigError, WeightsError
from jaxserve.weights.convert import convert
from jaxserve.weights.model_files import open_model


def as_bytes(params) -> dict[str, bytes]:
    return {name: np.asarray(array).tobytes() for name, array in params.items()}


def leftovers(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_converted_model_is_the_model_it_was_made_from(dtype, tiny_gguf, tmp_path):
    source = open_model(tiny_gguf)
    convert(tiny_gguf, tmp_path / "tiny", dtype=dtype)
    assert [p.name for p in tmp_path.iterdir()] == ["tiny"]
    converted = open_model(tmp_path / "tiny")
    assert (converted.format, converted.name) == ("orbax", "tiny")
    assert converted.config == source.config
    assert converted.param_shapes == source.param_shapes
    params, expected = converted.load_params(dtype), source.load_params(dtype)
    assert list(params) == list(expected)
    assert as_bytes(params) == as_bytes(expected)
    for name in params:
        assert params[name].dtype == (np.float32 if name.endswith("norm.weight") else dtype)
        assert params[name].sharding == expected[name].sharding
        assert params[name].committed == expected[name].committed
    assert converted.chat_templates() == source.chat_templates() != {}
    text = "hello <|start|> grüße 🙂"
    one, other = converted.load_tokenizer(), source.load_tokenizer()
    assert one.encode(text) == other.encode(text)
    assert one.eos_ids == other.eos_ids


def test_a_model_without_a_template_converts_to_one_without(make_gguf, tiny_tensors, tiny_pairs, tmp_path):
    pairs = {k: v for k, v in tiny_pairs.items() if k != "tokenizer.chat_template"}
    convert(make_gguf(tmp_path / "m.gguf", tiny_tensors, pairs), tmp_path / "m")
    assert open_model(tmp_path / "m").chat_templates() == {}


def test_a_converted_model_keeps_all_templates_and_defaults_of_sampling(
    make_gguf, tiny_tensors, tiny_pairs, tmp_path
):
    more = {
        "tokenizer.chat_template.tool_use": "{{ tools }}", "tokenizer.chat_templates": ["tool_use"],
        "general.sampling.temp": 0.6, "general.sampling.top_k": 20,
    }  # fmt: skip
    source = make_gguf(tmp_path / "m.gguf", tiny_tensors, tiny_pairs | more)
    converted = open_model(convert(source, tmp_path / "m"))
    assert converted.chat_templates() == {
        "default": tiny_pairs["tokenizer.chat_template"], "tool_use": "{{ tools }}",
    }  # fmt: skip
    assert dict(converted.generation_config().defaults().sampling) == {"temperature": 0.6, "top_k": 20}
    again = open_model(convert(tmp_path / "m", tmp_path / "again"))
    assert again.chat_templates() == converted.chat_templates()
    assert again.generation_config().values == converted.generation_config().values


def test_progress_reaches_the_total_of_each_part(tiny_gguf, tmp_path):
    calls = []
    convert(tiny_gguf, tmp_path / "tiny", progress=lambda *a: calls.append(a))
    for description in ("loading weights", "writing the checkpoint"):
        seen = [(done, total) for text, done, total in calls if text == description]
        assert seen[0][0] == 0
        assert seen == sorted(seen)
        assert seen[-1][0] == seen[-1][1] > 0


def test_an_existing_checkpoint_is_replaced_only_on_request(tiny_gguf, tmp_path):
    dst = convert(tiny_gguf, tmp_path / "tiny", dtype="float32")
    with pytest.raises(WeightsError, match="exists already"):
        convert(tiny_gguf, dst)
    assert open_model(dst).load_params("float32")
    convert(tiny_gguf, dst, overwrite=True)
    assert as_bytes(open_model(dst).load_params("bfloat16")) == as_bytes(
        open_model(tiny_gguf).load_params("bfloat16")
    )
    assert [p.name for p in tmp_path.iterdir()] == ["tiny"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_what_is_no_checkpoint_is_never_replaced(overwrite, tiny_gguf, tmp_path):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "thesis.tex").touch()
    (tmp_path / "file").touch()
    for name in ("precious", "file"):
        with pytest.raises(WeightsError, match="is no jaxserve checkpoint"):
            convert(tiny_gguf, tmp_path / name, overwrite=overwrite)
    assert (tmp_path / "precious" / "thesis.tex").exists()


def test_an_empty_folder_may_be_filled(tiny_gguf, tmp_path):
    (tmp_path / "empty").mkdir()
    assert open_model(convert(tiny_gguf, tmp_path / "empty")).format == "orbax"


def test_a_failed_conversion_leaves_nothing(tiny_gguf, make_gguf, tiny_tensors, tiny_pairs, tmp_path):
    bad = dict(tiny_tensors)
    del bad["blk.1.ffn_up.weight"]
    make_gguf(tmp_path / "bad.gguf", bad, tiny_pairs)
    with pytest.raises(WeightsError, match=r"missing: 'blk\.1\.ffn_up\.weight'"):
        convert(tmp_path / "bad.gguf", tmp_path / "out")
    with pytest.raises(ConfigError, match="float16"):
        convert(tiny_gguf, tmp_path / "out", dtype="float16")

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(tiny_gguf, tmp_path / "out", progress=interrupt)
    assert [p.name for p in tmp_path.iterdir()] == ["bad.gguf"]


def test_a_disk_without_room_is_an_error_before_the_work(tiny_gguf, tmp_path, monkeypatch):
    class Usage:
        free = 5 << 20

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)
    with pytest.raises(WeightsError, match=r"needs \d+ MiB, .* has 5 MiB free"):
        convert(tiny_gguf, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


FULL_DISK = """
import resource, signal, sys
from pathlib import Path
from jaxserve.errors import WeightsError
from jaxserve.weights import checkpoint
from jaxserve.weights.convert import convert
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # a write past the limit fails like one to a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[3]),) * 2)
if sys.argv[4] == "late":
    checkpoint.reserve = lambda folder, nbytes: None  # as if the disk filled up right after it
try:
    convert(sys.argv[1], sys.argv[2])
except WeightsError as error:
    print("refused:", error)
"""


@pytest.mark.parametrize(("limit", "when"), [(200, "tokenizer"), (30_000, "early"), (30_000, "late")])
def test_a_write_that_fails_is_one_line_and_leaves_nothing_that_looks_finished(
    limit, when, tiny_gguf, tmp_path
):
    done = subprocess.run(
        [sys.executable, "-c", FULL_DISK, tiny_gguf, tmp_path / "out", str(limit), when],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout == f"refused: {tmp_path / 'out'} can't be written: File too large\n"
    assert "Traceback" not in done.stderr
    # A thread of orbax may write into the hidden folder after it was removed.
    assert not (tmp_path / "out").exists() if when == "late" else list(tmp_path.iterdir()) == []


KILLED = """
import sys, time
from jaxserve.weights import convert as module

def stop(*_):
    print("now", flush=True)
    time.sleep(600)

stage, src, dst = sys.argv[1:]
def progress(description, done, total):
    if description == stage and done >= total // 2:
        stop()
if stage == "before the rename":
    module.sync_tree = stop
module.convert(src, dst, progress=progress)
"""


@pytest.mark.parametrize("stage", ["loading weights", "writing the checkpoint", "before the rename"])
def test_a_killed_conversion_leaves_nothing_that_looks_finished(stage, tiny_gguf, tmp_path):
    dst = tmp_path / "tiny"
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, stage, tiny_gguf, dst], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "now\n"
        with pytest.raises(WeightsError, match="is being written by another process"):
            convert(tiny_gguf, dst)
        process.send_signal(signal.SIGKILL)
    assert len(leftovers(tmp_path)) == 1
    assert not dst.exists()
    with pytest.raises(WeightsError, match="not found"):
        open_model(dst)
    convert(tiny_gguf, dst)
    assert open_model(dst).load_params("bfloat16")
    assert leftovers(tmp_path) == []


MEMORY = """
import sys
from pathlib import Path
import jax, numpy as np
from orbax.checkpoint.experimental import v1
import jaxserve.tokenizer.load
from jaxserve.weights import checkpoint
from jaxserve.weights.convert import convert
from jaxserve.weights.model_files import open_model

def memory(key):
    line = next(l for l in Path("/proc/self/status").read_text().splitlines() if l.startswith(key))
    return int(line.split()[1]) << 10

if sys.argv[1] == "convert":
    work = lambda src, dst: convert(src, dst)
else:
    checkpoint.CONCURRENT_BYTES = 8 << 20  # small beside this small model
    work = lambda src, dst: open_model(dst).load_params("bfloat16")
small, large, small_dst, large_dst = sys.argv[2:]
work(small, small_dst)  # a tiny one first: what libraries set up once does not count
before = memory("VmRSS")
result = work(large, large_dst)
print(memory("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_of_converting_and_of_loading_is_the_result_and_about_one_tensor(
    tiny_gguf, make_gguf, tiny_pairs, tmp_path
):
    hidden, mlp, layers, vocab = 1024, 4096, 6, len(tiny_pairs["tokenizer.ggml.tokens"])
    shapes = {"token_embd": (vocab, hidden), "output_norm": (hidden,)}
    for i in range(layers):
        shapes |= {f"blk.{i}.attn_{x}": (hidden, hidden) for x in ("q", "k", "v", "output")}
        shapes |= {f"blk.{i}.ffn_{x}": (mlp, hidden) for x in ("gate", "up")}
        shapes |= {f"blk.{i}.ffn_down": (hidden, mlp)}
        shapes |= {f"blk.{i}.{x}_norm": (hidden,) for x in ("attn", "ffn")}
    pairs = tiny_pairs | {
        "llama.embedding_length": hidden, "llama.feed_forward_length": mlp, "llama.block_count": layers,
        "llama.attention.head_count": 16, "llama.attention.head_count_kv": 16,
    }  # fmt: skip
    tensors = {
        f"{name}.weight": (np.ones(shape, np.float16), Q.F16 if len(shape) > 1 else Q.F32)
        for name, shape in shapes.items()
    }
    large = make_gguf(tmp_path / "large.gguf", tensors, pairs)
    result = sum(2 * int(np.prod(shape)) for shape in shapes.values())
    files = [tiny_gguf, large, tmp_path / "small", tmp_path / "large"]

    def peak(what: str) -> int:
        command = [sys.executable, "-c", MEMORY, what, *files]
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)

    # Far below a second copy (192 MiB), or what orbax keeps (100 MB) and one parameter: gate and up of all
    # layers are 96 MiB.
    assert peak("convert") < result + (128 << 20)
    assert peak("load") < result + (128 << 20)
