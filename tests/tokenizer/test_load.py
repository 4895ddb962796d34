"""What a folder or a GGUF file says about ends of texts and chat templates."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.errors import TokenizerError
from jaxserve.tokenizer import load

SPECIAL = ["<s>", "</s>", "<|im_end|>", "<|eot_id|>", "<stop>"]


def write(folder, name, value) -> None:
    (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


@pytest.fixture
def folder(tmp_path):
    """Letters a-z as ids 0-25, then the special tokens as ids 26-30, then two ordinary added ones."""
    letters = {chr(97 + i): i for i in range(26)}
    tokenizer = tokenizers.Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens(["<|end|>", "<tool>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_end_ids_come_from_every_file_and_from_well_known_special_tokens(folder):
    write(folder, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>"})
    write(folder, "generation_config.json", {"eos_token_id": [0, 1]})
    write(folder, "config.json", {"text_config": {"eos_token_id": 2}})
    tokenizer = load.from_folder(folder)
    # <|end|> is no special token in this vocabulary, so it is text.
    assert tokenizer.eos_ids == {27, 0, 1, 2, 28, 29}
    assert tokenizer.eos_id == 27
    assert tokenizer.bos_id == 26
    assert not tokenizer.add_bos


def test_a_token_may_be_spelled_as_an_object(folder):
    write(folder, "tokenizer_config.json", {"eos_token": {"content": "<stop>", "lstrip": False}})
    assert load.from_folder(folder).eos_id == 30


def test_bos_comes_from_the_model_config_unless_the_tokenizer_config_denies_it(folder):
    write(folder, "config.json", {"bos_token_id": 26})
    assert load.from_folder(folder).bos_id == 26
    write(folder, "tokenizer_config.json", {"bos_token": None})
    assert load.from_folder(folder).bos_id is None


def test_the_harmony_end_of_message_does_not_end_the_turn(tmp_path):
    tokenizer = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>", "<|return|>", "<|call|>"])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load.from_folder(tmp_path).eos_ids == {2, 3}


def test_saving_keeps_ends_that_nothing_in_the_vocabulary_shows(folder, tmp_path):
    write(folder, "tokenizer_config.json", {"bos_token": "<s>", "eos_token": "</s>", "add_bos_token": True})
    write(folder, "generation_config.json", {"eos_token_id": [5]})
    first = load.from_folder(folder)
    (target := tmp_path / "saved").mkdir()
    load.save(first, target)
    write(target, "generation_config.json", {"eos_token_id": [6]})  # what stands beside it adds nothing
    second = load.from_folder(target)
    assert second.boundaries == first.boundaries
    assert second.eos_ids == {27, 5, 28, 29}
    assert second.add_bos


@pytest.mark.parametrize(
    ("name", "value", "why"),
    [
        ("tokenizer_config.json", "{", r"tokenizer_config\.json is no valid JSON"),
        ("tokenizer_config.json", [1], "holds a list; expected an object"),
        ("tokenizer_config.json", {"bos_token": "<none>"}, "bos_token '<none>' is not in the vocabulary"),
        ("tokenizer_config.json", {"bos_token": None, "add_bos_token": True}, "names no BOS token"),
        ("tokenizer_config.json", {"boundaries": {"bos_id": 1}}, "'boundaries' is incomplete"),
        ("generation_config.json", {"eos_token_id": "x"}, "eos_token_id is 'x'; expected an id"),
        ("generation_config.json", {"eos_token_id": [10**6]}, "eos token id 1000000 is outside"),
        ("config.json", {"eos_token_id": -1}, "eos token id -1 is outside"),
    ],
)
def test_a_broken_configuration_is_an_error_that_says_what_is_wrong(folder, name, value, why):
    write(folder, name, value)
    with pytest.raises(TokenizerError, match=why):
        load.from_folder(folder)


def test_a_folder_without_a_tokenizer_is_an_error_that_says_what_it_lacks(tmp_path):
    with pytest.raises(TokenizerError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        load.from_folder(tmp_path)


def test_a_chat_template_file_comes_before_the_configuration(tmp_path):
    assert load.chat_template_from_folder(tmp_path) is None
    write(tmp_path, "tokenizer_config.json", {"chat_template": "from config"})
    assert load.chat_template_from_folder(tmp_path) == "from config"
    write(tmp_path, "chat_template.jinja", "from file ü")
    assert load.chat_template_from_folder(tmp_path) == "from file ü"


def test_of_several_named_templates_the_default_is_taken(tmp_path):
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    write(tmp_path, "tokenizer_config.json", {"chat_template": named})
    assert load.chat_template_from_folder(tmp_path) == "d"


@pytest.mark.parametrize("template", [7, {"a": 1}, [{"name": "x", "template": "y"}], [1]])
def test_a_template_that_is_none_is_an_error(template, tmp_path):
    write(tmp_path, "tokenizer_config.json", {"chat_template": template})
    with pytest.raises(TokenizerError, match="chat_template"):
        load.chat_template_from_folder(tmp_path)
    if not isinstance(template, list):
        with pytest.raises(TokenizerError, match="chat_template"):
            load.chat_template_from_gguf({"tokenizer.chat_template": template})


def test_only_a_loaded_tokenizer_can_be_saved(tmp_path):
    with pytest.raises(TokenizerError, match="can't be saved"):
        load.save(object(), tmp_path)
