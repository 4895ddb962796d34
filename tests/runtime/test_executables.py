"""Programs kept on the disk: found again, or made again, never trusted when something differs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxserve.engine.config import EngineConfig
from jaxserve.ops.backend import choose
from jaxserve.runtime import executables
from jaxserve.runtime.compilations import CompilationCounter
from jaxserve.runtime.executables import KEPT, Executables, fingerprint
from jaxserve.runtime.runner import shapes
from jaxserve.types import SamplingParams
from tests.runtime.conftest import Tiny
from tests.runtime.serving import Job, serve

CONFIG = EngineConfig(
    max_model_len=32, num_pages=5, max_num_seqs=2, max_prefill_tokens=16,
    decode_buckets=(2,), prefill_buckets=((2, 8),),
)  # fmt: skip
JOBS = [
    Job((1, 2, 3), SamplingParams(6, temperature=0.0)),
    Job((4, 5), SamplingParams(6, temperature=1.0, seed=9)),
]


@pytest.fixture
def counter() -> Iterator[CompilationCounter]:
    counter = CompilationCounter()
    yield counter
    counter.close()


def kept(folder: Path) -> list[Path]:
    return sorted((folder / "programs").glob("*/*"))


@pytest.fixture(scope="module")
def warm(
    tmp_path_factory: pytest.TempPathFactory, llama: Tiny
) -> tuple[Path, list[list[int]]]:
    """A folder that a first start has filled, and what that start answered."""
    folder = tmp_path_factory.mktemp("cache")
    return folder, serve(CONFIG, llama.runner(CONFIG, choose(), folder), JOBS)


def test_a_second_start_compiles_no_program_and_answers_the_same(warm, llama, counter):
    folder, answers = warm
    files = kept(folder)
    assert {path.name for path in files} == {"-".join(map(str, key)) for key in shapes(CONFIG)}
    before = {path: path.stat().st_mtime_ns for path in files}
    runner = llama.runner(CONFIG, choose(), folder)
    # Zeroed pools and packed weights are small programs of JAX's own.
    assert counter.count < len(shapes(CONFIG))
    assert {path: path.stat().st_mtime_ns for path in kept(folder)} == before
    assert serve(CONFIG, runner, JOBS) == answers


def test_damaged_programs_are_made_again(warm, llama):
    folder, answers = warm
    one, other, *rest = kept(folder)
    sound = one.stat().st_size
    one.write_bytes(one.read_bytes()[: sound // 2])
    other.write_bytes(b"nonsense")
    rest[0].unlink()
    assert serve(CONFIG, llama.runner(CONFIG, choose(), folder), JOBS) == answers
    assert len(kept(folder)) == len(shapes(CONFIG))
    assert one.stat().st_size > sound // 2
    assert other.stat().st_size > 100
    assert not list(folder.rglob("*.partial"))


@pytest.mark.parametrize("kind", ["decode", "greedy"])
def test_kept_programs_that_load_but_do_not_run_are_all_made_again(warm, llama, monkeypatch, caplog, kind):
    folder, answers = warm
    load, cleared = Executables.load, []

    def broken(*arguments):
        raise jax.errors.JaxRuntimeError("INTERNAL: Function not found")

    def load_one(self, key, in_tree, out_tree):
        return broken if key[0] == kind and not cleared else load(self, key, in_tree, out_tree)

    monkeypatch.setattr(Executables, "load", load_one)
    monkeypatch.setattr(Executables, "clear", lambda self: cleared.append(self))  # what is kept is sound
    runner = llama.runner(CONFIG, choose(), folder)
    assert len(cleared) == 1
    assert "all are compiled again: INTERNAL: Function not found" in caplog.text
    assert serve(CONFIG, runner, JOBS) == answers


def test_kept_programs_that_never_run_are_an_error(warm, llama, monkeypatch):
    def broken(*arguments):
        raise jax.errors.JaxRuntimeError("INTERNAL: Function not found")

    monkeypatch.setattr(Executables, "load", lambda self, key, in_tree, out_tree: broken)
    monkeypatch.setattr(Executables, "clear", lambda self: None)
    with pytest.raises(jax.errors.JaxRuntimeError, match="Function not found"):
        llama.runner(CONFIG, choose(), warm[0])


def test_whatever_shapes_a_program_changes_its_fingerprint(monkeypatch, llama):
    one = fingerprint(llama.model, CONFIG, "xla", "float32")
    assert one == fingerprint(llama.model, CONFIG, "xla", "float32")
    seen = {one, fingerprint(llama.model, CONFIG, "native", "float32")}
    seen.add(fingerprint(llama.model, CONFIG, "xla", "bfloat16"))
    monkeypatch.setenv("XLA_FLAGS", "--xla_cpu_enable_fast_math=true")
    seen.add(fingerprint(llama.model, CONFIG, "xla", "float32"))
    monkeypatch.undo()
    monkeypatch.setattr(executables, "_cpu_flags", lambda: "flags: 8086")
    seen.add(fingerprint(llama.model, CONFIG, "xla", "float32"))
    monkeypatch.undo()
    with jax.default_matmul_precision("highest"):
        seen.add(fingerprint(llama.model, CONFIG, "xla", "float32"))
    assert len(seen) == 6


def test_a_change_of_the_code_changes_the_fingerprint(monkeypatch, tmp_path):
    for folder in executables.SOURCES:
        (tmp_path / folder).mkdir()
    source = tmp_path / "ops" / "norm.py"
    source.write_text("eps = 1")
    monkeypatch.setattr(executables, "PACKAGE", tmp_path)
    one = fingerprint()
    source.write_text("eps = 2")
    two = fingerprint()
    source.rename(tmp_path / "ops" / "other.py")
    assert len({one, two, fingerprint()}) == 3
    assert {"models", "ops", "runtime"} <= set(executables.SOURCES)


def test_only_the_latest_used_sets_stay(tmp_path):
    for age in range(KEPT + 3):
        folder = tmp_path / "programs" / f"set-{age}"
        folder.mkdir(parents=True)
        os.utime(folder, (10**9 - age, 10**9 - age))
    Executables(tmp_path, f"set-{KEPT + 2}").prune()  # the oldest is used now
    left = {path.name for path in (tmp_path / "programs").iterdir()}
    assert left == {f"set-{age}" for age in [*range(KEPT - 1), KEPT + 2]}


def test_without_a_folder_nothing_is_kept_or_found():
    one = Executables(None, "name")
    compiled = jax.jit(lambda x: x + 1).lower(np.ones(3, np.float32)).compile()
    one.save(("greedy", 1, 1), compiled)
    one.prune()
    assert one.load(("greedy", 1, 1), None, None) is None


def test_a_folder_that_can_not_be_written_costs_time_only(tmp_path, caplog):
    compiled = jax.jit(lambda x: x + 1).lower(np.ones(3, np.float32)).compile()
    (tmp_path / "programs").write_text("a file where the folder should be")
    one = Executables(tmp_path, "name")
    one.save(("greedy", 1, 1), compiled)
    one.prune()
    one.clear()
    assert one.load(("greedy", 1, 1), None, None) is None
    assert caplog.text.count("is not kept") == 1


def test_a_program_survives_the_disk(tmp_path):
    ones = np.ones(3, np.float32)
    compiled = jax.jit(lambda x, y: (x + y, x)).lower(ones, ones).compile()
    key = ("decode", 1, 1)
    Executables(tmp_path, "name").save(key, compiled)
    in_tree = jax.tree.structure(((0, 0), {}))
    loaded = Executables(tmp_path, "name").load(key, in_tree, jax.tree.structure((0, 0)))
    assert loaded is not None
    assert loaded(ones, ones)[0].tolist() == [2, 2, 2]
    assert Executables(tmp_path, "another").load(key, in_tree, None) is None
