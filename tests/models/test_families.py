"""What each family makes of a file's description, and which tensors it asks for."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flax import nnx

from jaxserve.errors import ConfigError, WeightsError
from jaxserve.models.config import LayerConfig, ModelConfig, RopeScaling
from jaxserve.models.decoder import abstract_decoder
from jaxserve.models.registry import FAMILIES, family_for, family_named
from jaxserve.models.rope_scaling import at_length
from jaxserve.weights.model_files import open_model
from jaxserve.weights.source import TensorInfo
from tests.models.tiny import (
    CONFIGS,
    GEMMA3,
    HIDDEN,
    LLAMA,
    MLP,
    VOCAB,
    Source,
    gguf_metadata,
    hf_tensors,
    permute,
    write_gguf,
)  # fmt: skip

HEAD = {"output.weight": TensorInfo("output.weight", (VOCAB, HIDDEN), "F32", 4 * VOCAB * HIDDEN)}
LLAMA_CONFIG = ModelConfig(
    "llama", VOCAB, HIDDEN, MLP, num_heads=4, num_kv_heads=2, head_dim=16, max_position=256,
    rms_norm_eps=1e-5, attention_scale=0.25, activation="silu", tie_embeddings=False, embedding_scale=None,
    qk_norm=False, post_norms=False, layers=(LayerConfig(None, 5000.0),) * 3,
)  # fmt: skip
LOCAL, GLOBAL = LayerConfig(5, 10_000.0), LayerConfig(None, 1_000_000.0)
GEMMA3_CONFIG = ModelConfig(
    "gemma3", VOCAB, HIDDEN, MLP, num_heads=4, num_kv_heads=1, head_dim=16, max_position=256,
    rms_norm_eps=1e-6, attention_scale=0.25, activation="gelu_tanh", tie_embeddings=True,
    embedding_scale=HIDDEN**0.5, qk_norm=True, post_norms=True, layers=(*[LOCAL] * 5, GLOBAL, LOCAL),
)  # fmt: skip


def read_hf(config: dict[str, Any], **changes: Any) -> ModelConfig:
    """Translate a config.json; a change to None takes the key out."""
    data = {key: value for key, value in (config | changes).items() if value is not None}
    source = Source("safetensors", data)
    return family_for(source).config(source)


def read_gguf(config: dict[str, Any], changes: dict[str, Any] | None = None, **tensors: Any) -> ModelConfig:
    pairs = {k: v for k, v in (gguf_metadata(config) | (changes or {})).items() if v is not None}
    source = Source("gguf", pairs, tensors)
    return family_for(source).config(source)


# Translation.


def test_a_llama_means_the_same_in_both_formats():
    assert read_hf(LLAMA) == LLAMA_CONFIG
    assert read_gguf(LLAMA, **HEAD) == LLAMA_CONFIG
    assert read_gguf(LLAMA) == replace(LLAMA_CONFIG, tie_embeddings=True)


def test_a_gemma3_means_the_same_in_both_formats():
    assert read_hf(GEMMA3) == GEMMA3_CONFIG
    assert read_gguf(GEMMA3) == GEMMA3_CONFIG
    assert read_gguf(GEMMA3, **HEAD) == replace(GEMMA3_CONFIG, tie_embeddings=False)


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"num_key_value_heads": None}, "num_kv_heads", 4),
        ({"head_dim": None}, "head_dim", 8),
        ({"rms_norm_eps": None}, "rms_norm_eps", 1e-6),
        ({"tie_word_embeddings": True}, "tie_embeddings", True),
        ({"tie_word_embeddings": None}, "tie_embeddings", False),
        ({"rope_theta": None}, "layers", (LayerConfig(None, 10_000.0),) * 3),
        ({"rope_theta": 70}, "layers", (LayerConfig(None, 70.0),) * 3),
        ({"rope_theta": None, "rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}, "layers",
         (LayerConfig(None, 9.0),) * 3),
        ({"rope_scaling": {"rope_type": "default"}}, "layers", LLAMA_CONFIG.layers),
    ],
)  # fmt: skip
def test_defaults_and_spellings_of_a_llama_config_json(changes, field, value):
    assert getattr(read_hf(LLAMA, **changes), field) == value


KINDS = ["full_attention", "sliding_attention"] * 3 + ["full_attention"]
BY_KIND = {
    "full_attention": {"rope_type": "default", "rope_theta": 7.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 3.0},
}


@pytest.mark.parametrize(
    ("changes", "field", "value"),
    [
        ({"query_pre_attn_scalar": None}, "attention_scale", 1 / 16),
        ({"query_pre_attn_scalar": 64}, "attention_scale", 1 / 8),
        ({"head_dim": None}, "head_dim", 256),
        ({"tie_word_embeddings": False}, "tie_embeddings", False),
        ({"sliding_window_pattern": None}, "layers", (*[LOCAL] * 5, GLOBAL, LOCAL)),
        ({"sliding_window_pattern": 3}, "layers", (LOCAL, LOCAL, GLOBAL) * 2 + (LOCAL,)),
        ({"layer_types": KINDS}, "layers", (GLOBAL, LOCAL) * 3 + (GLOBAL,)),
        ({"rope_parameters": BY_KIND}, "layers", (*[LayerConfig(5, 3.0)] * 5, LayerConfig(None, 7.0),
                                                  LayerConfig(5, 3.0))),
        ({"final_logit_softcapping": None}, "layers", GEMMA3_CONFIG.layers),
    ],
)  # fmt: skip
def test_defaults_and_spellings_of_a_gemma3_config_json(changes, field, value):
    assert getattr(read_hf(GEMMA3, **changes), field) == value


def test_the_gemma3_of_62_layers_scales_by_hidden_size_over_heads():
    changes = {"gemma3.block_count": 62, "gemma3.embedding_length": 5376, "gemma3.attention.head_count": 32}
    config = read_gguf(GEMMA3, changes)
    assert config.attention_scale == pytest.approx((5376 / 32) ** -0.5)
    assert read_gguf(GEMMA3, changes | {"gemma3.block_count": 48}).attention_scale == 0.25


# What is refused.


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("llama", "rope_scaling", {"rope_type": "spiral", "factor": 8.0}),
        ("llama", "rope_parameters", {"rope_type": "spiral", "factor": 8.0}),
        ("llama", "rope_parameters", {"rope_theta": 1.0, "partial_rotary_factor": 0.5}),
        ("llama", "partial_rotary_factor", 0.5),
        ("llama", "hidden_act", "gelu"),
        ("gemma3", "rope_scaling", {"rope_type": "spiral", "factor": 8.0}),
        ("gemma3", "rope_parameters", BY_KIND | {"full_attention": {"rope_type": "x", "rope_theta": 1,
                                                                    "factor": 8.0}}),
        ("gemma3", "rope_parameters", BY_KIND | {"sliding_attention": {"rope_type": "linear",
                                                                       "rope_theta": 1}}),
        ("gemma3", "attention_bias", True),
        ("gemma3", "use_bidirectional_attention", True),
        ("gemma3", "hidden_activation", "gelu"),
        ("gemma3", "layer_types", ["chunked_attention"] * 7),
        ("gemma3", "layer_types", ["full_attention"] * 6),
    ],
)
def test_an_option_of_config_json_that_would_change_the_answer_is_refused_by_name(family, key, value):
    with pytest.raises(WeightsError, match=key):
        read_hf(CONFIGS[family], **{key: value})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("llama.rope.scaling.type", "spiral"),
        ("llama.attention.scale", 0.1),
        ("llama.attention.value_length", 8),
        ("llama.rope.dimension_count", 8),
        ("llama.attention.head_count_kv", [1, 2, 2]),
        ("gemma3.rope.scaling.type", "spiral"),
        ("gemma3.attention.value_length", 8),
    ],
)
def test_a_gguf_key_that_would_change_the_answer_is_refused_by_name(key, value):
    with pytest.raises(WeightsError, match=key.replace(".", r"\.")):
        read_gguf(CONFIGS[key.split(".")[0]], {key: value})


# RoPE scaling: against published figures, or the formula spelled out once more for one pair.

LLAMA31 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 64}  # fmt: skip


def rope(config: ModelConfig) -> RopeScaling:
    return config.layers[0].rope


def test_scaled_rope_means_the_same_in_both_formats():
    linear = read_hf(LLAMA, rope_scaling={"type": "linear", "factor": 4.0})
    assert rope(linear) == RopeScaling((4.0,) * 8)
    assert linear.max_position == 4 * 256
    for key in ("scaling.factor", "scale_linear"):
        assert rope(read_gguf(LLAMA, {f"llama.rope.{key}": 4.0})) == rope(linear)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    keys = {"type": "yarn", "factor": 4.0, "original_context_length": 64}
    from_gguf = read_gguf(LLAMA, {f"llama.rope.scaling.{key}": value for key, value in keys.items()})
    assert rope(from_gguf) == rope(read_hf(LLAMA, rope_scaling=yarn))
    assert rope(from_gguf).attention_factor == pytest.approx(0.1 * np.log(4) + 1)


def test_yarn_takes_its_magnitude_from_the_file():
    yarn = {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64}
    assert rope(read_hf(LLAMA, rope_scaling=yarn | {"attention_factor": 1.5})).attention_factor == 1.5
    deepseek = yarn | {"mscale": 0.707, "mscale_all_dim": 0.707}
    assert rope(read_hf(LLAMA, rope_scaling=deepseek)).attention_factor == 1.0


def test_llama3_keeps_short_waves_and_stretches_long_ones():
    factors = np.array(rope(read_hf(LLAMA, rope_scaling=LLAMA31)).factors)
    turns = 64 * 5000.0 ** (-np.arange(8) / 8) / (2 * np.pi)  # over the original context
    assert (factors[turns > 4] == 1).all()
    assert (factors[turns < 1] == 8).all()
    between = (turns > 1) & (turns < 4)
    assert between.any()
    assert ((factors[between] > 1) & (factors[between] < 8)).all()


def test_longrope_takes_the_set_of_factors_for_the_context_that_is_served():
    scaling = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    config = read_hf(LLAMA, rope_scaling=scaling, original_max_position_embeddings=64)
    magnitude = (1 + np.log(4) / np.log(64)) ** 0.5
    for length, factor in ((64, 1.0), (65, 2.0)):
        made = at_length(config, length)
        assert rope(made) == RopeScaling((factor,) * 8, attention_factor=pytest.approx(magnitude))
        assert at_length(made, 10**6) == made
    with pytest.raises(WeightsError, match="RoPE factors"):
        read_hf(LLAMA, rope_scaling=scaling | {"long_factor": [2.0] * 7})


def test_dynamic_ntk_raises_theta_beyond_the_original_context_alone():
    config = read_hf(LLAMA, rope_scaling={"type": "dynamic", "factor": 2.0})
    assert at_length(config, 256).layers == LLAMA_CONFIG.layers
    assert at_length(config, 512).layers[0].rope_theta == pytest.approx(5000.0 * 3 ** (16 / 14))


def test_a_gguf_tensor_of_rope_factors_is_read(tmp_path):
    factors = np.linspace(1, 8, 8, dtype=np.float32)
    path = write_gguf(
        tmp_path / "x.gguf", LLAMA, {**hf_tensors(LLAMA), "rope_freqs.weight": factors}
    )
    files = open_model(path)
    assert rope(files.config).factors == tuple(factors.tolist())
    files.close()


HF_NEEDED = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size",
             "max_position_embeddings")  # fmt: skip
HF_SIZES = (*HF_NEEDED, "num_key_value_heads", "head_dim")
GGUF_NEEDED = ("context_length", "embedding_length", "block_count", "feed_forward_length",
               "attention.head_count", "attention.layer_norm_rms_epsilon")  # fmt: skip
GGUF_SIZES = (*GGUF_NEEDED[:5], "attention.key_length")


@pytest.mark.parametrize("family", CONFIGS)
def test_a_description_that_lacks_a_key_names_it(family):
    config = CONFIGS[family]
    more = {"llama": ((), ()), "gemma3": (("sliding_window",), ("attention.sliding_window",))}[family]
    for key in (*HF_NEEDED, *more[0]):
        with pytest.raises(WeightsError, match=f"lacks {key}$"):
            read_hf(config, **{key: None})
    for key in (*GGUF_NEEDED, *more[1]):
        with pytest.raises(WeightsError, match=rf"lacks {family}\.{key}$"):
            read_gguf(config, {f"{family}.{key}": None})


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("value", ["12", 1.5, True, [1], {"a": 1}, 0, -4])
def test_a_size_that_is_no_positive_whole_number_is_named(family, value):
    for key in HF_SIZES:
        with pytest.raises(WeightsError, match=rf"^{key} = "):
            read_hf(CONFIGS[family], **{key: value})
    for key in GGUF_SIZES:
        with pytest.raises(WeightsError, match=rf"^{family}\.{key} = "):
            read_gguf(CONFIGS[family], {f"{family}.{key}": value})


@pytest.mark.parametrize(
    "changes",
    [
        {"num_key_value_heads": 3}, {"head_dim": 15}, {"rms_norm_eps": float("nan")}, {"rms_norm_eps": 0.0},
        {"rope_theta": float("inf")}, {"rope_theta": -1.0}, {"rope_parameters": []},
        {"rope_parameters": {"rope_theta": "x"}}, {"rope_scaling": "linear"},
    ],
)  # fmt: skip
@pytest.mark.parametrize("family", CONFIGS)
def test_figures_that_no_decoder_can_have_are_errors(family, changes):
    with pytest.raises(WeightsError):
        read_hf(CONFIGS[family], **changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 0}, {"sliding_window_pattern": 0}, {"query_pre_attn_scalar": 0},
        {"query_pre_attn_scalar": -1.0}, {"rope_local_base_freq": 0.0}, {"layer_types": [3] * 7},
        {"rope_parameters": {"full_attention": {"rope_theta": 7.0}}},
        {"rope_parameters": {"rope_theta": 7.0}},
        {"rope_parameters": {"full_attention": 3, "sliding_attention": 4}},
    ],
)  # fmt: skip
def test_figures_that_no_gemma3_can_have_are_errors(changes):
    with pytest.raises(WeightsError):
        read_hf(GEMMA3, **changes)


@pytest.mark.parametrize(
    ("format", "metadata"),
    [
        ("gguf", {"general.architecture": "mamba"}), ("gguf", {}), ("gguf", {"general.architecture": 3}),
        ("safetensors", {"architectures": ["MambaForCausalLM"]}), ("safetensors", {}),
        ("safetensors", {"architectures": []}), ("safetensors", {"architectures": [["x"]]}),
    ],
)  # fmt: skip
def test_an_unknown_architecture_is_an_error_that_lists_the_known_ones(format, metadata):
    with pytest.raises(WeightsError, match="supported") as raised:
        family_for(Source(format, metadata))
    assert all(known in str(raised.value).lower() for known in ("llama", "gemma3"))


def test_families_are_found_by_the_name_that_a_checkpoint_keeps():
    assert [family_named(family.name) for family in FAMILIES] == list(FAMILIES)
    with pytest.raises(WeightsError, match=r"'mamba'.*llama, .*gemma3"):
        family_named("mamba")


# Stored configs.


@pytest.mark.parametrize("config", [LLAMA_CONFIG, GEMMA3_CONFIG], ids=["llama", "gemma3"])
def test_a_config_survives_json(config):
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.pop("head_dim"), "head_dim"),
        (lambda data: data.update(flavour=1), "flavour"),
        (lambda data: data.pop("layers"), "layers"),
        (lambda data: data["layers"][0].update(flavour=1), "flavour"),
        (lambda data: data.update(layers=[]), "num_layers"),
        (lambda data: data.update(hidden_size="64"), "hidden_size"),
        (lambda data: data.update(num_kv_heads=0), "num_kv_heads"),
        (lambda data: data.update(num_heads=3), "num_heads"),
    ],
)
def test_a_stored_config_that_is_damaged_names_what_is_wrong(change, message):
    data = json.loads(json.dumps(LLAMA_CONFIG.to_json()))
    change(data)
    with pytest.raises(ConfigError, match=message):
        ModelConfig.from_json(data)


# Weights.


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("format", ["gguf", "safetensors"])
@pytest.mark.parametrize("config", [LLAMA_CONFIG, GEMMA3_CONFIG], ids=["llama", "gemma3"])
def test_rules_make_exactly_the_decoders_parameters(config, format, tied):
    config = replace(config, tie_embeddings=tied)
    family = family_named(config.family)
    rules = family.rules(format, config)
    wanted = nnx.to_flat_state(nnx.split(abstract_decoder(config, "float32"))[1])
    shapes = {".".join(map(str, path)): leaf.shape for path, leaf in wanted}
    assert {rule.param: rule.shape for rule in rules} == shapes
    assert len(rules) == len(shapes)
    for rule in rules:
        rows = sum(part.shape[0] for part in rule.parts)
        assert np.prod((rows, *rule.parts[0].shape[1:])) == np.prod(rule.shape)
        assert {part.shape[1:] for part in rule.parts} == {rule.parts[0].shape[1:]}
    names = [part.name for rule in rules for part in rule.parts]
    assert len(set(names)) == len(names)
    assert not set(names) & family.ignored(format, config)


@pytest.mark.parametrize("config", [LLAMA_CONFIG, GEMMA3_CONFIG], ids=["llama", "gemma3"])
def test_a_tied_output_matrix_may_stand_in_a_safetensors_file(config):
    family = family_named(config.family)
    assert "lm_head.weight" in family.ignored("safetensors", replace(config, tie_embeddings=True))
    assert "lm_head.weight" not in family.ignored("safetensors", replace(config, tie_embeddings=False))


@pytest.mark.parametrize("format", ["gguf", "safetensors"])
def test_query_and_key_rows_of_a_llama_gguf_are_put_back_in_order(format):
    config = LLAMA_CONFIG
    rng = np.random.default_rng(0)
    qkv = next(r for r in family_named("llama").rules(format, config) if r.param.endswith("qkv.weight"))
    for part, heads in zip(qkv.parts[:3], (config.num_heads, config.num_kv_heads, None)):
        weight = rng.standard_normal(part.shape).astype(np.float32)
        if heads is None or format == "safetensors":
            assert part.transform is None
        else:
            assert part.transform is not None
            np.testing.assert_array_equal(part.transform(permute(weight, heads)), weight)


def test_a_gemma_norm_gains_its_one_from_safetensors_alone():
    for format in ("gguf", "safetensors"):
        for rule in family_named("gemma3").rules(format, GEMMA3_CONFIG):
            for part in rule.parts:
                if "norm" in part.name and format == "safetensors":
                    assert part.transform is not None
                    np.testing.assert_array_equal(part.transform(np.float32([-1, 0, 0.5])), [0, 1, 1.5])
                else:
                    assert part.transform is None
