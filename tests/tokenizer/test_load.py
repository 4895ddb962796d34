"""What a folder says about special tokens and the ends of texts, in old forms and new."""

from __future__ import annotations

import json

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jaxserve.errors import TokenizerError
from jaxserve.tokenizer import load
from jaxserve.tokenizer.boundaries import END_TEXTS

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


def test_several_eos_tokens_all_end_a_text_and_the_first_is_the_one_that_templates_spell(folder):
    write(folder, "tokenizer_config.json", {"eos_token": ["<stop>", {"content": "</s>"}]})
    tokenizer = load.from_folder(folder)
    assert tokenizer.eos_id == 30
    assert tokenizer.eos_ids >= {30, 27}


def test_the_special_tokens_map_says_what_the_tokenizer_config_leaves_out(folder):
    older = {"bos_token": {"content": "<s>"}, "eos_token": "<stop>", "additional_special_tokens": ["<tool>"]}
    write(folder, "special_tokens_map.json", older)
    tokenizer = load.from_folder(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (26, 30)
    assert tokenizer.is_special(32)
    write(folder, "tokenizer_config.json", {"bos_token": None, "eos_token": "</s>"})
    tokenizer = load.from_folder(folder)
    assert (tokenizer.bos_id, tokenizer.eos_id) == (None, 27)


@pytest.mark.parametrize(
    "config",
    [
        {"eos_token": "<tool>"},
        {"additional_special_tokens": ["<tool>"]},
        {"additional_special_tokens": [{"content": "<tool>", "lstrip": False}]},
        {"extra_special_tokens": ["<tool>"]},
        {"extra_special_tokens": {"tool_token": "<tool>"}},
        {"added_tokens_decoder": {"32": {"content": "<tool>", "special": True}}},
    ],
)
def test_a_token_that_the_configuration_calls_special_is_special(config, folder):
    before = load.from_folder(folder)
    write(folder, "tokenizer_config.json", config)
    after = load.from_folder(folder)
    text = "ab<tool>c<|end|><s>"
    assert after.encode(text) == before.encode(text) == [0, 1, 32, 2, 31, 26]
    assert not before.is_special(32)
    assert after.is_special(32)
    assert after.decode([0, 32, 1]) == "ab"
    # The others are what they were.
    assert [i for i in range(33) if after.is_special(i)] == [26, 27, 28, 29, 30, 32]


def test_a_plain_letter_may_be_called_special_too(folder):
    write(folder, "tokenizer_config.json", {"eos_token": "z"})
    tokenizer = load.from_folder(folder)
    assert tokenizer.eos_ids >= {25}
    assert tokenizer.decode([0, 25]) == "a"


def test_added_tokens_of_the_configuration_alone_extend_the_vocabulary(folder):
    added = {
        "33": {"content": "<more>", "special": True, "lstrip": False},
        "34": {"content": "<plain>", "special": False},
    }
    write(folder, "tokenizer_config.json", {"added_tokens_decoder": added, "eos_token": "<more>"})
    tokenizer = load.from_folder(folder)
    assert tokenizer.vocab_size == 35
    assert tokenizer.encode("a<more><plain>b") == [0, 33, 34, 1]
    assert tokenizer.eos_id == 33
    assert (tokenizer.is_special(33), tokenizer.is_special(34)) == (True, False)


@pytest.mark.parametrize("text", END_TEXTS)
def test_an_end_of_turn_token_is_known_by_its_text_where_it_is_special_and_no_file_names_it(text, tmp_path):
    tokenizer = tokenizers.Tokenizer(models.BPE({"a": 0}, []))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([text])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load.from_folder(tmp_path).eos_ids == {1}


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
        ("tokenizer_config.json", {"bos_token": 7}, r"config\.json: bos_token is 7; expected a text"),
        ("tokenizer_config.json", {"bos_token": ["<s>", "</s>"]}, "expected one token"),
        ("tokenizer_config.json", {"eos_token": {"lstrip": True}}, "eos_token is {'lstrip': True}; expected"),
        ("special_tokens_map.json", {"eos_token": [1]}, r"special_tokens_map\.json: eos_token is 1; exp"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"3": {"content": "<x>"}}},
         "says that id 3 is '<x>', in tokenizer.json it is 'd'"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"40": {"content": "<x>"}}},
         "'<x>' the id 40, but .* it gets 33: ids must be without a gap"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"33": {"content": "d"}}}, "'d' the id 33, but"),
        ("tokenizer_config.json", {"added_tokens_decoder": [1]}, "added_tokens_decoder is malformed"),
        ("tokenizer_config.json", {"bos_token": None, "add_bos_token": True}, "names no BOS token"),
        ("tokenizer_config.json", {"boundaries": {"bos_id": 1}}, "'boundaries' is incomplete"),
        ("generation_config.json", {"eos_token_id": "x"}, "eos_token_id is 'x'; expected an id"),
        ("generation_config.json", {"eos_token_id": [10**6]}, "eos token id 1000000 is outside"),
        ("config.json", {"eos_token_id": -1}, "eos token id -1 is outside"),
    ],
)  # fmt: skip
def test_a_broken_configuration_is_an_error_that_says_what_is_wrong(folder, name, value, why):
    write(folder, name, value)
    with pytest.raises(TokenizerError, match=why):
        load.from_folder(folder)


def test_a_folder_without_a_tokenizer_is_an_error_that_says_what_it_lacks(tmp_path):
    with pytest.raises(TokenizerError, match=r"neither tokenizer\.json nor tokenizer\.model"):
        load.from_folder(tmp_path)


def test_only_a_loaded_tokenizer_can_be_saved(tmp_path):
    with pytest.raises(TokenizerError, match="can't be saved"):
        load.save(object(), tmp_path)
