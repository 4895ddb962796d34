"""`jaxserve pull` and `jaxserve convert`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxserve import cli


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
    flags = ["--dtype", "float32", "--quantization", "int8", "--overwrite"]
    assert cli.main(["convert", "a.gguf", "out", *flags]) == 0
    assert seen == {
        "src": "a.gguf", "dst": Path("out"), "dtype": "float32", "quantization": "int8", "overwrite": True,
    }  # fmt: skip
    assert capsys.readouterr().out == "out\n"
