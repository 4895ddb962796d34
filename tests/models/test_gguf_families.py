"""Every family as a GGUF file: the same model as from the Hugging Face folder that the file was made from."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from jaxserve.errors import WeightsError
from jaxserve.models.registry import FAMILIES
from jaxserve.tokenizer import load as load_tokenizer
from jaxserve.weights.convert import convert
from jaxserve.weights.model_files import open_model
from tests.models import family_weights, gguf_families
from tests.models.paged import load
from tests.models.tiny import write_hf

FOLDER = Path(__file__).parent / "families"
WHOLE_ATTENTION = {"use_sliding_window": False}
LOCAL_LOCAL_GLOBAL = ["sliding_attention", "sliding_attention", "full_attention"] * 2
# What GGUF has no key for, set to what a reader of the file takes it to be.
UNSAID: dict[str, dict[str, Any]] = {
    "mistral": {"sliding_window": None},
    "qwen2-window": {"use_sliding_window": False},
    "gemma2": {"query_pre_attn_scalar": 32},  # the head size
    "gemma3": {"query_pre_attn_scalar": 32},
    "gemma3-linear": {"query_pre_attn_scalar": 32},
    "gemma3-rope-parameters": {
        "query_pre_attn_scalar": 32, "layer_types": LOCAL_LOCAL_GLOBAL, "sliding_window_pattern": 3,
    },
}  # fmt: skip
# Which GGUF can't hold at all, and why.
LEFT_OUT = {"llama-dynamic": "no key for dynamic NTK", "qwen3-moe-mixed": "no key for which layers"}
CASES = sorted(path.stem for path in FOLDER.glob("*.json") if path.stem not in LEFT_OUT)

# A case of each family, where it isn't called like the family.
BY_FAMILY = {"qwen2moe": "qwen2-moe", "qwen3moe": "qwen3-moe", "deepseek": "deepseek-v2-lite"}
BY_FAMILY = {family.name: BY_FAMILY.get(family.name, family.name) for family in FAMILIES}


def case(name: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """config.json and tensors of a recorded case, as far as GGUF can say it."""
    recorded = json.loads((FOLDER / f"{name}.json").read_text())
    tensors = family_weights.tensors(recorded["config"], recorded["shapes"])
    return recorded["config"] | UNSAID.get(name, {}), tensors


def flat(value: Any, at: str = "") -> dict[str, Any]:
    """The leaves of a config by their paths."""
    if isinstance(value, dict):
        return {k: v for key, one in value.items() for k, v in flat(one, f"{at}.{key}").items()}
    if isinstance(value, list | tuple):
        return {k: v for i, one in enumerate(value) for k, v in flat(one, f"{at}.{i}").items()}
    return {at: value}


def assert_same_model(one: Path, other: Path, *, exact: bool = False) -> None:
    """`exact`: no float may differ by the rounding of GGUF's float32 keys."""
    (config, params), (expected, expected_params) = load(one), load(other)
    config = replace(config, family=expected.family)  # GGUF has mistral and mixtral under llama's name
    assert config == expected if exact else flat(asdict(config)) == pytest.approx(flat(asdict(expected)))
    assert list(params) == list(expected_params)
    for name in params:
        np.testing.assert_array_equal(params[name], expected_params[name], err_msg=name)


@pytest.mark.parametrize("name", CASES)
def test_a_gguf_file_is_the_model_that_it_was_made_from(name, tmp_path):
    config, tensors = case(name)
    folder = write_hf(tmp_path / "hf", config, tensors)
    assert_same_model(gguf_families.write(tmp_path / "x.gguf", config, tensors), folder)


def test_every_family_with_a_gguf_architecture_is_among_the_cases():
    read = {case(name)[0]["architectures"][0] for name in CASES}
    assert read == set(gguf_families.ARCHITECTURES)
    written = {gguf.MODEL_ARCH_NAMES[arch] for arch in gguf_families.ARCHITECTURES.values()}
    assert {arch for family in FAMILIES for arch in family.gguf_architectures} == written


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe", "qwen3-moe"])
def test_experts_with_a_tensor_each_are_those_of_one_tensor(name, tmp_path):
    config, tensors = case(name)
    merged = gguf_families.write(tmp_path / "merged.gguf", config, tensors)
    single = gguf_families.write(tmp_path / "single.gguf", config, tensors, single_experts=True)
    assert_same_model(single, merged, exact=True)


def test_latents_whose_matrix_is_whole_are_those_of_its_halves(tmp_path):
    config, tensors = case("deepseek-v2-lite")
    newer = gguf_families.write(tmp_path / "newer.gguf", config, tensors)
    older = gguf_families.write(tmp_path / "older.gguf", config, tensors, whole_latents=True)
    assert_same_model(older, newer, exact=True)


def test_an_expert_that_is_missing_is_named(tmp_path):
    config, tensors = case("mixtral")
    del tensors["model.layers.2.block_sparse_moe.experts.5.w3.weight"]
    path = gguf_families.write(tmp_path / "x.gguf", config, tensors, single_experts=True)
    with pytest.raises(WeightsError, match=r"blk\.2\.ffn_up_exps\.weight.*\[8, 96, 64\].*\[7, 96, 64\]"):
        open_model(path)


def test_the_router_of_a_shared_expert_may_be_a_row_or_a_vector(tmp_path):
    config, tensors = case("qwen2-moe")
    row = gguf_families.write(tmp_path / "row.gguf", config, tensors)
    for name in tensors:
        if name.endswith("shared_expert_gate.weight"):
            assert tensors[name].ndim == 2
            tensors[name] = tensors[name][0]
    assert_same_model(gguf_families.write(tmp_path / "vector.gguf", config, tensors), row, exact=True)


@pytest.mark.parametrize("name", sorted({*BY_FAMILY.values(), "llama-biases", "phi4-mini", "gpt-oss-mxfp4"}))
def test_a_converted_gguf_file_is_the_same_model(name, tmp_path):
    path = gguf_families.write(tmp_path / "x.gguf", *case(name), single_experts=name == "qwen2-moe")
    assert_same_model(convert(path, tmp_path / "converted", dtype="float32"), path, exact=True)


@pytest.mark.parametrize("family", [family.name for family in FAMILIES])
def test_a_converted_folder_is_the_same_model(family, tmp_path):
    config, tensors = case(BY_FAMILY[family])
    folder = write_hf(tmp_path / "hf", config, tensors)
    # Any tokenizer will do; the folders of the cases have none.
    lent = open_model(gguf_families.write(tmp_path / "x.gguf", *case("llama")))
    load_tokenizer.save(lent.load_tokenizer(), folder)
    lent.close()
    assert_same_model(convert(folder, tmp_path / "converted", dtype="float32"), folder, exact=True)


def test_any_part_of_a_split_file_opens_the_whole(tmp_path):
    config, tensors = case("mixtral")
    whole = gguf_families.write(tmp_path / "whole.gguf", config, tensors)
    first = gguf_families.write(tmp_path / "model.gguf", config, tensors, parts=3, single_experts=True)
    assert sorted(path.name for path in tmp_path.glob("model-*")) == [
        f"model-0000{i}-of-00003.gguf" for i in (1, 2, 3)
    ]
    for part in tmp_path.glob("model-*"):
        assert_same_model(part, whole, exact=True)
    model = open_model(first)
    assert model.name == "model"
    assert model.load_tokenizer().eos_id == config["vocab_size"] - 1
    model.close()


def test_parts_that_do_not_make_a_whole_are_named(tmp_path):
    config, tensors = case("llama")
    first = gguf_families.write(tmp_path / "model.gguf", config, tensors, parts=3)
    second, third = (tmp_path / f"model-0000{i}-of-00003.gguf" for i in (2, 3))
    second.write_bytes(third.read_bytes())
    with pytest.raises(WeightsError, match=r"model-00002-of-00003\.gguf: split\.no .* 2 and 3, not 1 and 3"):
        open_model(first)
    second.unlink()
    for path in (first, third):
        with pytest.raises(WeightsError, match=r"model-00002-of-00003\.gguf is not beside it"):
            open_model(path)
    third.unlink()
    with pytest.raises(WeightsError, match=r"model-00002-of-00003\.gguf, model-00003.* are not beside it"):
        open_model(first)
    alone = first.rename(tmp_path / "renamed.gguf")
    with pytest.raises(WeightsError, match=r"one of 3 parts.*NAME-00001-of-00003\.gguf"):
        open_model(alone)


def test_a_part_of_another_model_of_as_many_parts_is_refused(tmp_path):
    config, tensors = case("llama")
    first = gguf_families.write(tmp_path / "model.gguf", config, tensors, parts=3)
    (tmp_path / "other").mkdir()
    fewer = {name: values for name, values in tensors.items() if "layers.3" not in name}
    other = gguf_families.write(tmp_path / "other" / "model.gguf", config, fewer, parts=3)
    name = "model-00003-of-00003.gguf"
    (tmp_path / name).write_bytes(other.with_name(name).read_bytes())
    with pytest.raises(WeightsError, match=r"is in another part|split\.tensors\.count is 39, .* have \d\d "):
        open_model(first)


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("olmo2", "olmo2.attention.sliding_window", 8),  # as olmo3 has it, under this name
        ("llama", "llama.attention.clamp_kqv", 8.0),
        ("qwen2", "qwen2.final_logit_softcapping", 30.0),
        ("qwen3-moe", "qwen3moe.expert_gating_func", 2),
        ("qwen3-moe", "qwen3moe.leading_dense_block_count", 1),
        ("llama-yarn", "llama.rope.scaling.yarn_ext_factor", 0.5),
        ("llama-yarn", "llama.rope.scaling.yarn_attn_factor", 0.5),
        ("llama-yarn", "llama.rope.scaling.yarn_log_multiplier", 0.1),
        ("gpt-oss", "gpt-oss.attention.sliding_window_pattern", 3),
        ("gpt-oss", "gpt-oss.rope.freq_base_swa", 10000.0),
        ("deepseek-v3", "deepseek2.attention.temperature_scale", 0.5),
        ("deepseek-v3", "deepseek2.expert_gating_func", 3),
        ("deepseek-v3", "deepseek2.leading_dense_block_count", 4),
        ("deepseek-v3", "deepseek2.rope.scaling.attn_factor", 0.5),
        ("deepseek-v2", "deepseek2.expert_weights_norm", True),
    ],
)
def test_a_key_that_would_change_the_answer_is_refused_by_name(name, key, value, tmp_path):
    path = gguf_families.write(tmp_path / "x.gguf", *case(name), pairs={key: value})
    with pytest.raises(WeightsError, match=key.replace(".", r"\.") + f" = {value}"):
        open_model(path)


def test_yarn_multiplies_its_usual_magnitude_by_the_factor_of_the_file(tmp_path):
    for file, factor in (("one.gguf", 1.0), ("other.gguf", 0.5)):
        pairs = {"llama.rope.scaling.attn_factor": factor}
        config, _ = load(gguf_families.write(tmp_path / file, *case("llama-yarn"), pairs=pairs))
        usual = 0.1 * np.log(4) + 1
        assert config.layers[0].rope.attention_factor == pytest.approx(factor * usual)
