"""deepseek beyond the figures of test_family_figures.py: served whole, its cache, routing and options."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jaxserve.engine.config import EngineConfig
from jaxserve.errors import WeightsError
from jaxserve.models.config import ModelConfig
from jaxserve.models.decoder import abstract_decoder
from jaxserve.models.family import fitted
from jaxserve.models.registry import family_for, family_named
from jaxserve.ops.backend import XLA, choose
from jaxserve.ops.moe import route_in_groups
from jaxserve.runtime.runner import ModelRunner
from jaxserve.runtime.state import kv_bytes_per_token, kv_shapes
from jaxserve.types import SamplingParams
from jaxserve.weights.gguf import GGUFSource
from jaxserve.weights.model_files import open_model
from tests.models import family_weights, gguf_families
from tests.models.paged import Decoder, load
from tests.models.test_family_figures import recorded, written
from tests.models.tiny import Source, write_hf
from tests.runtime.serving import Job, serve

V2, LITE, V3 = (recorded(name) for name in ("deepseek-v2", "deepseek-v2-lite", "deepseek-v3"))
SERVED = EngineConfig(
    max_model_len=64, num_pages=40, page_size=4, max_num_seqs=3, max_prefill_tokens=30,
    decode_buckets=(3,), prefill_buckets=((3, 10),),
)  # fmt: skip


def read(case: dict[str, Any], **changes: Any) -> ModelConfig:
    data = case["config"] | changes
    source = Source("safetensors", {key: value for key, value in data.items() if value is not None})
    return family_for(source).config(source)


@pytest.mark.parametrize(("dtype", "same"), [("float32", 12), ("bfloat16", 1)])
def test_the_engine_answers_as_transformers_does_on_the_backend_that_auto_takes(dtype, same, tmp_path):
    """In bfloat16 a later token of such a model may be another: the second best is close."""
    files = open_model(written(V2, tmp_path / "model"))
    config = files.config
    backend = choose(head_dim=config.head_dim)
    runner = ModelRunner(config, files.load_params(dtype), SERVED, backend, dtype=dtype)
    runs = list(V2["runs"].values())
    greedy = SamplingParams(len(runs[0]["ids"]), temperature=0.0)
    jobs = [Job(tuple(run["prompt"]), greedy, turn) for turn, run in enumerate(runs)]
    assert [ids[:same] for ids in serve(SERVED, runner, jobs)] == [run["ids"][:same] for run in runs]


def test_native_attention_reads_latents_as_the_reference_does(tmp_path):
    """The recorded cases have keys of 40 values, which no native kernel takes; these have 48."""
    config = V3["config"] | {"qk_rope_head_dim": 16}
    wider = {"q_b_proj": [128, 24], "kv_a_proj_with_mqa": [48, 64]}
    shapes = {name: wider.get(name.split(".")[-2], shape) for name, shape in V3["shapes"].items()}
    model, params = load(write_hf(tmp_path / "model", config, family_weights.tensors(config, shapes)))
    backend = choose(head_dim=model.head_dim)
    if backend.attention_name != "native":
        pytest.skip("needs the C++ kernels")
    prompts = [V3["runs"]["long"]["prompt"], V3["runs"]["short"]["prompt"]]
    chunks = [[7, 7, 7, 7, 7, 5], [7, 5, 0, 0, 0, 0]]
    wanted = Decoder(model, params, XLA).logits(prompts, chunks, queries=7)
    for got, want in zip(Decoder(model, params, backend).logits(prompts, chunks, queries=7), wanted):
        np.testing.assert_allclose(got, want, rtol=0, atol=3e-4)


@pytest.mark.parametrize("lanes", [None, 128])
def test_the_cache_keeps_latents_alone(lanes):
    model = read(V3)
    assert (model.num_kv_heads, model.head_dim, model.value_head_dim) == (1, 32 + 8, 0)
    per_token = kv_bytes_per_token(model, "bfloat16", lanes)
    assert per_token == model.num_layers * (lanes or 40) * 2
    pool = kv_shapes(model, SERVED, "bfloat16", lanes)
    nbytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pool))
    assert nbytes == SERVED.num_pages * SERVED.page_size * per_token


# Routing.


def dense_route(scores: np.ndarray, bias: np.ndarray | None, k: int, groups: int, active: int) -> list[int]:
    """One token's experts, by loops."""
    choice = scores if bias is None else scores + bias
    size = len(scores) // groups
    parts = [sorted(choice[g * size : (g + 1) * size])[::-1] for g in range(groups)]
    best = [part[0] if bias is None else sum(part[:2]) for part in parts]
    kept = sorted(range(groups), key=lambda g: -best[g])[:active]
    return sorted((e for e in range(len(scores)) if e // size in kept), key=lambda e: -choice[e])[:k]


@pytest.mark.parametrize("sigmoid", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize(("groups", "active"), [(1, 1), (4, 2), (4, 4), (12, 3)])
@pytest.mark.parametrize("normalise", [True, False])
def test_routing_is_that_of_loops(sigmoid, biased, groups, active, normalise):
    rng = np.random.default_rng([groups, active, biased])
    logits = rng.standard_normal((50, 12)).astype(np.float32)
    # With it all scores are below 0, and those of other groups still don't come before them.
    bias = rng.uniform(-2, -1, 12).astype(np.float32) if biased else None
    experts, weights = route_in_groups(
        jnp.asarray(logits), 3, choice_bias=bias, sigmoid=sigmoid, num_groups=groups, active_groups=active,
        normalise=normalise, scale=2.5,
    )  # fmt: skip
    exp = np.exp(logits.astype(np.float64))
    scores = 1 / (1 + 1 / exp) if sigmoid else exp / exp.sum(axis=1, keepdims=True)
    for token in range(len(logits)):
        wanted = dense_route(scores[token], bias, 3, groups, active)
        assert experts[token].tolist() == wanted
        found = scores[token][wanted]
        found = found / found.sum() if normalise else found
        np.testing.assert_allclose(weights[token], 2.5 * found, rtol=1e-5)


# Descriptions.


@pytest.mark.parametrize("case", [V2, LITE, V3], ids=["v2", "v2-lite", "v3"])
def test_a_config_survives_json_and_its_rules_make_the_decoders_parameters(case):
    config = read(case)
    assert ModelConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    rules = family_named(config.family).rules("safetensors", config)
    wanted = nnx.to_flat_state(nnx.split(abstract_decoder(config, "float32"))[1])
    assert {rule.param: rule.shape for rule in rules} == {
        ".".join(map(str, path)): leaf.shape for path, leaf in wanted
    }


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        (V3, {"attention_bias": True}, "attention_bias = True"),
        (V3, {"scoring_func": "softmax"}, "scoring_func = 'softmax'.*sigmoid"),
        (V2, {"scoring_func": "sigmoid"}, "scoring_func = 'sigmoid'.*softmax"),
        (V3, {"moe_layer_freq": 2}, "moe_layer_freq = 2"),
        (V3, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        (V3, {"rope_interleave": False}, "rope_interleave = False"),
        (V2, {"norm_topk_prob": True}, "norm_topk_prob = True"),
        (V2, {"topk_method": "noaux_tc"}, "topk_method = 'noaux_tc'.*group_limited_greedy"),
        (V3, {"topk_method": "greedy"}, "topk_method = 'greedy'.*noaux_tc"),
        (V3, {"first_k_dense_replace": 4}, "first_k_dense_replace = 4.*less than .*4"),
        (V3, {"n_group": 5}, "expert groups is 5, .* divisor of 12"),
        (V3, {"topk_group": 4}, "active groups is 4, .* number of groups, 3"),
        (V3, {"topk_group": 1, "num_experts_per_tok": 5}, "active groups is 1, .* enough for 5 experts"),
        (V3, {"kv_lora_rank": None}, "lacks kv_lora_rank"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(case, changes, message):
    with pytest.raises(WeightsError, match=message):
        read(case, **changes)


def gguf_description(case: dict[str, Any], path: Path) -> Source:
    """Of a file of before there were keys for groups of experts."""
    tensors = family_weights.tensors(case["config"], case["shapes"])
    file = GGUFSource(gguf_families.write(path, case["config"], tensors, whole_latents=True))
    file.close()
    return Source("gguf", dict(file.metadata), file.tensors)


@pytest.mark.parametrize(("experts", "groups"), [(160, (8, 3)), (256, (8, 4)), (64, (1, 1)), (384, (1, 1))])
def test_an_older_gguf_file_has_the_groups_of_the_model_with_as_many_experts(experts, groups, tmp_path):
    source = gguf_description(V3, tmp_path / "x.gguf")
    source.metadata["deepseek2.expert_count"] = experts
    moe = family_for(source).config(source).moe
    assert (moe.num_groups, moe.active_groups) == groups
    source.metadata["deepseek2.expert_group_count"] = 1  # a file that does say
    assert family_for(source).config(source).moe.active_groups == 1


def test_yarn_in_a_gguf_file_needs_the_weight_of_its_magnitude(tmp_path):
    source = gguf_description(V3, tmp_path / "x.gguf")
    key = "deepseek2.rope.scaling.yarn_log_multiplier"
    assert source.metadata.pop(key) == pytest.approx(0.1)
    with pytest.raises(WeightsError, match=f"lacks {key}"):
        family_for(source).config(source)


def test_a_matrix_that_a_gguf_file_has_both_whole_and_in_halves_is_read_once():
    config = read(V3)
    family = family_named(config.family)
    rules = family.rules("gguf", config)
    whole, halves = (
        {f"blk.{i}.attn_{part}_b.weight" for i in range(4) for part in parts} for parts in (["kv"], "kv")
    )
    for names, read_from in ((whole, whole), (halves, halves), (whole | halves, whole)):
        parts = {part.name for rule in fitted(rules, names) for part in rule.parts}
        assert parts & (whole | halves) == read_from
    assert halves <= family.ignored("gguf", config)


def test_the_layer_that_guesses_a_further_token_may_stand_in_the_files(tmp_path):
    tensors = family_weights.tensors(V3["config"], V3["shapes"])
    last = {name: value for name, value in tensors.items() if name.startswith("model.layers.3.")}
    further = {name.replace(".3.", ".4.", 1): value for name, value in last.items()}
    further |= {
        f"model.layers.4.{name}.weight": np.ones(4, np.float32)
        for name in ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")
    }
    open_model(write_hf(tmp_path / "model", V3["config"], tensors | further)).close()
    with pytest.raises(WeightsError, match=r"not part of this model: 'model\.layers\.5\.enorm\.weight'"):
        open_model(
            write_hf(
                tmp_path / "other", V3["config"], tensors | {"model.layers.5.enorm.weight": np.ones(4, "f")}
            )
        )
