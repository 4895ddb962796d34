"""Defaults of sampling from a model's files: which keys count, their ranges, and that they survive."""

from __future__ import annotations

import json

import numpy as np
import pytest

from jaxserve.errors import ConfigError, RequestError, TokenizerError
from jaxserve.server.schema import validate_chat
from jaxserve.tokenizer.generation import (
    RANGES,
    generation_from_folder,
    generation_from_gguf,
    write_generation,
)

ALL = {
    "temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1,
    "max_new_tokens": 100,
}  # fmt: skip
OTHERS = {"bos_token_id": 1, "eos_token_id": [2], "transformers_version": "4.51", "pad_token_id": 0}


@pytest.fixture
def read(tmp_path):
    def read(**values):
        (tmp_path / "generation_config.json").write_text(json.dumps(values))
        return generation_from_folder(tmp_path)

    return read


def test_the_keys_of_a_request_are_defaults_and_others_are_none_of_our_business(read):
    found = read(**ALL, **OTHERS, do_sample=True).defaults()
    assert found.max_tokens == 100
    assert dict(found.sampling) == {key: ALL[key] for key in ALL if key != "max_new_tokens"}
    assert str(found) == (
        "temperature 0.6, top_p 0.95, top_k 20, min_p 0.05, repetition_penalty 1.1, max_tokens 100"
    )


def test_a_file_that_says_nothing_of_sampling_gives_no_defaults(read, tmp_path):
    for config in (
        read(**OTHERS),
        read(temperature=None, do_sample=None),
        generation_from_folder(tmp_path / "x"),
    ):
        found = config.defaults()
        assert not found
        assert (dict(found.sampling), found.max_tokens) == ({}, None)


def test_a_model_that_does_not_draw_is_greedy_whatever_temperature_stands_beside_it(read):
    assert dict(read(do_sample=False).defaults().sampling) == {"temperature": 0}
    assert read(do_sample=False, temperature=0.7).defaults().sampling["temperature"] == 0
    assert dict(read(do_sample=True, temperature=0.7).defaults().sampling) == {"temperature": 0.7}


WRONG = [
    ("temperature", 2.5, "a number from 0 to 2"),
    ("temperature", -0.1, "a number from 0 to 2"),
    ("temperature", float("nan"), "a number from 0 to 2"),
    ("temperature", "0.5", "a number"),
    ("temperature", True, "a number"),
    ("top_p", 1.1, "a number from 0 to 1"),
    ("top_k", -2, "a whole number from -1 to 2147483647"),
    ("top_k", 2.5, "a whole number"),
    ("top_k", float("inf"), "a whole number"),
    ("min_p", [0.1], "a number from 0 to 1"),
    ("repetition_penalty", 0, "a number from 0.01 to 100"),
    ("max_new_tokens", 0, "a whole number from 1 "),
    ("do_sample", 1, "true or false"),
]


@pytest.mark.parametrize(("key", "value", "why"), WRONG)
def test_a_value_out_of_range_is_an_error_that_names_file_key_limit_and_remedy(
    key, value, why, read, tmp_path
):
    with pytest.raises(ConfigError) as caught:
        read(**{key: value}).defaults()
    text = str(caught.value)
    assert f"{tmp_path}/generation_config.json: {key} is {value!r}; expected {why}" in text
    assert "--generation-config none" in text


@pytest.mark.parametrize("key", RANGES)
def test_ranges_are_those_of_the_request_field(key, read):
    """A default could be sent by a client, and what lies beyond could not."""
    field = "max_completion_tokens" if key == "max_new_tokens" else key
    step = 1 if key in ("top_k", "max_new_tokens") else 0.001
    for limit, beyond in zip(RANGES[key], (-step, step)):
        body = {"messages": [{"role": "user", "content": "x"}]}
        assert getattr(validate_chat({**body, field: limit}), field) == limit
        assert read(**{key: limit}).defaults()
        with pytest.raises(RequestError):
            validate_chat({**body, field: limit + beyond})
        with pytest.raises(ConfigError):
            read(**{key: limit + beyond}).defaults()


def test_a_gguf_file_says_the_same_by_its_own_keys():
    pairs = {
        "general.sampling.temp": float(np.float32(0.6)), "general.sampling.top_p": float(np.float32(0.95)),
        "general.sampling.top_k": 20, "general.sampling.min_p": float(np.float32(0.05)),
        "general.sampling.penalty_repeat": float(np.float32(1.1)), "general.sampling.mirostat": 2,
    }  # fmt: skip
    found = generation_from_gguf(pairs, "m.gguf").defaults()
    assert dict(found.sampling) == {key: ALL[key] for key in ALL if key != "max_new_tokens"}
    assert not generation_from_gguf({}, "m.gguf").defaults()
    with pytest.raises(ConfigError, match=r"m\.gguf: general\.sampling\.temp is 7\.0; expected"):
        generation_from_gguf({"general.sampling.temp": 7.0}, "m.gguf").defaults()


@pytest.mark.parametrize("values", [ALL, {"do_sample": False, "temperature": 0.3}, {}])
def test_what_is_written_is_read_back(values, read, tmp_path):
    (target := tmp_path / "to").mkdir()
    config = read(**values, **OTHERS)
    write_generation(config, target)
    again = generation_from_folder(target)
    assert again.values == config.values
    assert again.defaults().sampling == config.defaults().sampling
    assert (target / "generation_config.json").exists() == bool(values)


def test_a_broken_file_is_an_error_that_names_it(tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(TokenizerError, match=r"generation_config\.json is no valid JSON"):
        generation_from_folder(tmp_path)
