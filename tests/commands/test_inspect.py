"""`jaxserve inspect`: what it says of models that load, and of those that don't."""

from __future__ import annotations

import json
from typing import Any

import pytest
from safetensors.numpy import save_file

from jaxserve import cli
from jaxserve.weights.bytefile import ByteFile
from jaxserve.weights.convert import convert
from tests.models import gguf_families
from tests.models.test_gguf_families import case


def inspect(capsys, model, *flags: str) -> tuple[int, str]:
    status = cli.main(["inspect", str(model), *flags])
    return status, capsys.readouterr().out


def inspect_json(capsys, model) -> tuple[int, dict[str, Any]]:
    status, text = inspect(capsys, model, "--json")
    return status, json.loads(text)


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    return gguf_families.write(tmp_path_factory.mktemp("inspect") / "moe.gguf", *case("mixtral"))


def rows(text: str) -> dict[str, str]:
    return {line[:15].strip(): line[15:] for line in text.splitlines()}


def test_a_gguf_file_is_described_without_reading_a_tensor(mixtral, capsys, monkeypatch):
    def read(*_: object) -> None:
        raise AssertionError("a tensor is read")

    monkeypatch.setattr(ByteFile, "read", read)
    status, text = inspect(capsys, mixtral)
    count = sum(values.size for values in case("mixtral")[1].values())
    assert status == 0
    assert rows(text) == {
        "model": f"{mixtral} (gguf)",
        "architecture": "llama",
        "family": "llama",
        "parameters": f"{count:,} in {4 * count / 1e6:.1f} MB",
        "F32": f"43 tensors, {4 * count / 1e6:.1f} MB, 32.00 bits a value",
        "context": "256 tokens",
        "layers": "4 of width 64",
        "feed-forward": "2 of 8 experts a token, of width 96",
        "attention": "4 heads of 16, 2 for keys and values",
        "window": "none",
        "rope": "theta 10000",
        "tokenizer": "BPE, words cut as llama-bpe; 160 tokens",
        "chat template": "none: a base model",
        "would load": "yes",
    }


@pytest.mark.parametrize(
    ("name", "window", "rope"),
    [
        ("gemma3", "8 tokens in 4 of 6 layers", "theta 100 in 4 layers; theta 10000 in 2 layers"),
        ("smollm3", "none", "theta 10000 in 3 layers; none in 1 layers"),
        ("phi3-longrope", "200 tokens in 4 of 4 layers",
         "theta 10000, factors 1 to 2.5, factors of long contexts 1 to 9.5, made for 32 tokens"),
    ],
)  # fmt: skip
def test_windows_and_rope_are_told_by_layers(name, window, rope, tmp_path, capsys):
    path = gguf_families.write(tmp_path / "x.gguf", *case(name))
    status, text = inspect(capsys, path)
    assert (status, rows(text)["window"], rows(text)["rope"]) == (0, window, rope)


def test_a_converted_folder_counts_the_same_parameters(mixtral, tmp_path, capsys):
    _, original = inspect_json(capsys, mixtral)
    status, found = inspect_json(capsys, convert(mixtral, tmp_path / "converted"))
    assert status == 0
    assert (found["format"], found["family"], found["would_load"]) == ("orbax", "llama", True)
    assert found["parameters"] == original["parameters"]
    assert list(found["types"]) == ["bfloat16", "float32"]
    assert found["config"] == original["config"]


def test_the_first_line_of_a_chat_template_is_shown(mixtral, tmp_path, capsys):
    folder = convert(mixtral, tmp_path / "converted")
    (folder / "chat_template.jinja").write_text("\n{% for m in messages %}\n{{ m.content }}{% endfor %}")
    status, text = inspect(capsys, folder)
    assert (status, rows(text)["chat template"]) == (0, "{% for m in messages %}")
    (folder / "chat_template.jinja").write_text("{% for m in %}")
    status, found = inspect_json(capsys, folder)
    assert status == 1
    assert "template" in found["problems"][0]


def test_what_would_not_load_is_described_as_far_as_it_goes_with_the_reason(tmp_path, capsys):
    config, tensors = case("llama")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    lacks = gguf_families.write(tmp_path / "lacks.gguf", config, tensors)
    status, text = inspect(capsys, lacks)
    assert status == 1
    assert rows(text)["would load"] == "no"
    assert "1 tensor missing: 'blk.1.ffn_up.weight'" in rows(text)["because"]
    assert rows(text)["family"] == "llama"
    assert rows(text)["tokenizer"].endswith("160 tokens")


def test_an_architecture_that_is_not_supported_is_named_with_its_size(tmp_path, capsys):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"architectures": ["RwkvForCausalLM"]}))
    save_file({"w": case("llama")[1]["lm_head.weight"]}, folder / "model.safetensors")
    status, found = inspect_json(capsys, folder)
    assert status == 1
    assert (found["architecture"], found["family"]) == ("RwkvForCausalLM", None)
    assert found["parameters"] == 160 * 64
    assert "architectures = 'RwkvForCausalLM' is not supported; supported:" in found["problems"][0]
    assert "neither tokenizer.json nor tokenizer.model" in found["problems"][1]


def test_a_file_that_is_no_model_is_told_in_its_own_words(tmp_path, capsys):
    (tmp_path / "x.gguf").write_bytes(b"no model at all")
    status, found = inspect_json(capsys, tmp_path / "x.gguf")
    assert (status, found["parameters"], found["config"]) == (1, None, None)
    assert found["problems"] == [f"{tmp_path / 'x.gguf'}: no GGUF file: it begins with b'no m', not b'GGUF'"]


def test_a_model_that_is_not_there_is_an_error_of_one_line(capsys):
    assert cli.main(["inspect", "nothing-of-this-name"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: model 'nothing-of-this-name' not found")
