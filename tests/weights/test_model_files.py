from __future__ import annotations

import json

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q
from safetensors.numpy import save_file

from jaxserve.errors import WeightsError
from jaxserve.weights.convert import convert
from jaxserve.weights.gguf import GGUFSource
from jaxserve.weights.manifest import MANIFEST
from jaxserve.weights.model_files import find_model, open_model


@pytest.fixture(scope="module")
def converted(tiny_gguf, tmp_path_factory):
    return convert(tiny_gguf, tmp_path_factory.mktemp("converted") / "tiny")


def test_a_gguf_file_gives_config_parameters_tokenizer_and_template(tiny_gguf):
    model = open_model(str(tiny_gguf))
    assert (model.format, model.name, model.path) == ("gguf", "tiny-llama", tiny_gguf)
    assert (model.config.family, model.config.num_layers, model.config.head_dim) == ("llama", 2, 16)
    params = model.load_params("float32")
    assert {name: array.shape for name, array in params.items()} == model.param_shapes
    source = GGUFSource(tiny_gguf)
    np.testing.assert_array_equal(
        np.asarray(params["layers.mlp.gate_up.weight"][1]),
        np.concatenate([source.read(f"blk.1.ffn_{x}.weight") for x in ("gate", "up")]),
    )
    tokenizer = model.load_tokenizer()
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"
    assert "messages" in model.chat_templates()["default"]
    model.close()


def test_a_hugging_face_folder_is_opened(tiny_gguf, tmp_path):
    folder = tmp_path / "org--name"
    folder.mkdir()
    c = open_model(tiny_gguf).config
    config = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": c.vocab_size, "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size, "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads, "num_key_value_heads": c.num_kv_heads,
        "max_position_embeddings": c.max_position, "rms_norm_eps": c.rms_norm_eps, "rope_theta": 10000.0,
        "tie_word_embeddings": True, "hidden_act": "silu",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    h, m, kv = c.hidden_size, c.intermediate_size, c.num_kv_heads * c.head_dim
    shapes = {"model.embed_tokens.weight": (c.vocab_size, h), "model.norm.weight": (h,)}
    for i in range(c.num_layers):
        at = f"model.layers.{i}."
        shapes |= {at + "self_attn.q_proj.weight": (h, h), at + "self_attn.o_proj.weight": (h, h)}
        shapes |= {at + f"self_attn.{x}_proj.weight": (kv, h) for x in "kv"}
        shapes |= {at + f"mlp.{x}_proj.weight": (m, h) for x in ("gate", "up")}
        shapes |= {at + "mlp.down_proj.weight": (h, m)}
        shapes |= {at + f"{x}_layernorm.weight": (h,) for x in ("input", "post_attention")}
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    model = open_model("org/name", checkpoints=tmp_path)
    assert (model.format, model.name, model.config) == ("safetensors", "org/name", c)
    qkv = np.asarray(model.load_params("float32")["layers.attention.qkv.weight"][0])
    parts = [tensors[f"model.layers.0.self_attn.{x}_proj.weight"] for x in "qkv"]
    np.testing.assert_array_equal(qkv, np.concatenate(parts))


def test_a_name_is_looked_up_in_checkpoints_the_converted_folder_first(tiny_gguf, converted, tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(tiny_gguf.read_bytes())
    assert find_model("tiny", checkpoints=tmp_path) == tmp_path / "tiny.gguf"
    convert("tiny", tmp_path / "tiny", checkpoints=tmp_path)
    assert find_model("tiny", checkpoints=tmp_path) == tmp_path / "tiny"
    assert open_model("tiny", checkpoints=tmp_path).format == "orbax"
    assert open_model(converted, checkpoints=tmp_path).path == converted


def test_a_model_that_is_not_there_says_how_to_get_it(tmp_path):
    with pytest.raises(WeightsError, match=r"'smollm2-135m' not found.*`jaxserve pull smollm2-135m`"):
        open_model("smollm2-135m", checkpoints=tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(WeightsError, match="folder is no model"):
        open_model(tmp_path / "folder")
    (tmp_path / "x.safetensors").touch()
    with pytest.raises(WeightsError, match="name its folder"):
        open_model(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"blk.0.attn_k.weight": None}, r"missing: 'blk\.0\.attn_k\.weight'; .*\[32, 64\]"),
        ({"blk.9.attn_k.weight": ((2, 32), Q.F32)}, r"not part of this model: 'blk\.9\.attn_k\.weight'"),
        ({"blk.0.attn_k.weight": ((64, 32), Q.F32)}, r"expected \[32, 64\] .*, found \[64, 32\]"),
    ],
)
def test_tensors_that_do_not_fit_the_config_are_an_error_on_opening(
    change, message, make_gguf, tiny_tensors, tiny_pairs, tmp_path
):
    tensors = dict(tiny_tensors)
    for name, value in change.items():
        tensors.pop(name, None)
        if value is not None:
            tensors[name] = (np.zeros(value[0], np.float32), value[1])
    path = make_gguf(tmp_path / "bad.gguf", tensors, tiny_pairs)
    with pytest.raises(WeightsError, match=message) as caught:
        open_model(path)
    assert str(path) in str(caught.value)


def test_an_unsupported_architecture_is_named_with_the_file(make_gguf, tmp_path):
    path = make_gguf(tmp_path / "m.gguf", {}, {})
    path.write_bytes(path.read_bytes().replace(b"llama", b"mamba"))
    with pytest.raises(WeightsError, match=r"m\.gguf: general\.architecture = 'mamba'.*llama"):
        open_model(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"final_norm.weight": None}, r"'final_norm\.weight': expected \[64\], found none"),
        ({"more": [3]}, r"'more': expected none, found \[3\]"),
        ({"final_norm.weight": [65]}, r"expected \[64\], found \[65\]"),
    ],
)
def test_a_checkpoint_whose_parameters_do_not_fit_its_config_is_an_error(
    change, message, tiny_gguf, tmp_path
):
    path = convert(tiny_gguf, tmp_path / "tiny") / MANIFEST
    data = json.loads(path.read_text())
    parameters = data["parameters"] | change
    data["parameters"] = {name: shape for name, shape in parameters.items() if shape is not None}
    path.write_text(json.dumps(data))
    with pytest.raises(WeightsError, match=message):
        open_model(path.parent)


def test_a_checkpoint_of_an_unknown_family_is_an_error(tiny_gguf, tmp_path):
    path = convert(tiny_gguf, tmp_path / "tiny") / MANIFEST
    path.write_text(path.read_text().replace('"family": "llama"', '"family": "mamba"'))
    with pytest.raises(WeightsError, match="mamba"):
        open_model(path.parent)


@pytest.mark.parametrize("name", ["smollm2", "gemma3"])
def test_the_real_models_open_with_every_parameter_accounted_for(name, request):
    model = open_model(request.getfixturevalue(f"{name}_gguf"))
    assert model.name.startswith(name)
    used = {part.name for rule in model._rules for part in rule.parts}
    assert set(model.source.tensors) == used
