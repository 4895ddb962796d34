"""Chat templates in every form in which they come with a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxserve.errors import TokenizerError
from jaxserve.tokenizer.template_files import templates_from_folder, templates_from_gguf, write_templates

TWO = {"default": "d ü\n", "tool_use": "t"}


def write(folder: Path, name: str, value: object) -> None:
    (folder / name).parent.mkdir(exist_ok=True)
    text = value if isinstance(value, str) else json.dumps(value)
    (folder / name).write_text(text, encoding="utf-8")


def listed(templates: dict[str, str]) -> list[dict[str, str]]:
    return [{"name": name, "template": source} for name, source in templates.items()]


FORMS = {
    "a string": ({"tokenizer_config.json": {"chat_template": "d"}}, {"default": "d"}),
    "a list": ({"tokenizer_config.json": {"chat_template": listed(TWO)}}, TWO),
    "an object": ({"tokenizer_config.json": {"chat_template": TWO}}, TWO),
    "a file": ({"chat_template.jinja": "d ü\n"}, {"default": "d ü\n"}),
    "files": ({"chat_template.jinja": TWO["default"], "additional_chat_templates/tool_use.jinja": "t"}, TWO),
    "json of a processor": ({"chat_template.json": {"chat_template": "d"}}, {"default": "d"}),
    "null": ({"tokenizer_config.json": {"chat_template": None}}, {}),
    "no default": ({"additional_chat_templates/rag.jinja": "r"}, {"rag": "r"}),
    "nothing": ({}, {}),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_folder_gives_the_same_templates_in_every_form(form, tmp_path):
    files, expected = FORMS[form]
    for name, value in files.items():
        write(tmp_path, name, value)
    assert templates_from_folder(tmp_path) == expected


@pytest.mark.parametrize("form", FORMS)
def test_templates_that_were_written_are_read_back_whatever_form_they_had(form, tmp_path):
    _, templates = FORMS[form]
    write_templates(templates, tmp_path)
    assert templates_from_folder(tmp_path) == templates


def test_files_of_their_own_come_first_and_replace_what_a_configuration_says(tmp_path):
    write(tmp_path, "chat_template.json", {"chat_template": "processor"})
    assert templates_from_folder(tmp_path) == {"default": "processor"}
    write(tmp_path, "tokenizer_config.json", {"chat_template": listed(TWO)})
    assert templates_from_folder(tmp_path) == TWO
    write(tmp_path, "chat_template.jinja", "file")
    assert templates_from_folder(tmp_path) == {"default": "file"}


def test_a_folder_of_further_templates_leaves_the_default_to_the_configuration(tmp_path):
    write(tmp_path, "additional_chat_templates/tool_use.jinja", "from file")
    write(tmp_path, "tokenizer_config.json", {"chat_template": listed(TWO)})
    assert templates_from_folder(tmp_path) == {"default": TWO["default"], "tool_use": "from file"}


def test_a_gguf_file_gives_the_default_and_the_named_ones():
    pairs = {
        "tokenizer.chat_template": "d", "tokenizer.chat_template.tool_use": "t",
        "tokenizer.chat_template.rag": "r", "tokenizer.chat_templates": ["rag", "tool_use"],
    }  # fmt: skip
    assert templates_from_gguf(pairs) == {"default": "d", "tool_use": "t", "rag": "r"}
    assert templates_from_gguf({"tokenizer.chat_template": "d"}) == {"default": "d"}
    assert templates_from_gguf({"tokenizer.ggml.model": "gpt2"}) == {}


@pytest.mark.parametrize(
    ("pairs", "why"),
    [
        ({"tokenizer.chat_template": 7}, "tokenizer.chat_template is a int; expected a string"),
        ({"tokenizer.chat_template.x": ["y"]}, "chat_template.x is a list"),
        ({"tokenizer.chat_templates": ["x"]}, "lists 'x', but there is no tokenizer.chat_template.x"),
        ({"tokenizer.chat_template.../x": "y"}, "is called '../x'"),
    ],
)
def test_broken_pairs_are_an_error_that_names_the_key(pairs, why):
    with pytest.raises(TokenizerError, match=why):
        templates_from_gguf(pairs)


@pytest.mark.parametrize(
    ("template", "why"),
    [
        (7, "chat_template is a int; expected a string or a list"),
        ({"a": 1}, r"chat_template\.a is a int"),
        ([1], r"chat_template\[0\] is 1; expected an object of name and template"),
        ([{"name": "x"}], r"chat_template\[0\]\.template is a NoneType"),
        ([{"name": "../x", "template": "y"}], "is called '../x'; expected letters"),
        ("\ud800", "is no valid Unicode"),
    ],
)
@pytest.mark.parametrize("file", ["tokenizer_config.json", "chat_template.json"])
def test_a_template_that_is_none_is_an_error_that_names_the_file(file, template, why, tmp_path):
    write(tmp_path, file, {"chat_template": template})
    with pytest.raises(TokenizerError, match=why) as caught:
        templates_from_folder(tmp_path)
    assert file in str(caught.value)


def test_a_file_that_is_no_text_is_an_error_that_names_it(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match=r"can't read .*chat_template\.jinja"):
        templates_from_folder(tmp_path)
