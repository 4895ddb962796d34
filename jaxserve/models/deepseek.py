"""The deepseek family: v2 and v3, and what has their wiring (Moonlight, Kimi-K2)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from jaxserve.models import names, standard
from jaxserve.models.config import LatentConfig, ModelConfig, MoEConfig
from jaxserve.models.family import Part, WeightRule, stack_layers
from jaxserve.models.metadata import Metadata, refuse
from jaxserve.models.rope_metadata import Rope, rope_from_gguf, rope_from_hf
from jaxserve.models.rope_scaling import yarn_magnitude
from jaxserve.weights.source import TensorSource

name = "deepseek"
gguf_architectures = ("deepseek2",)
hf_architectures = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")

_PREDICTOR = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")
_HF = {
    **names.HF,
    "q_down": "self_attn.q_a_proj.weight",
    "q_norm": "self_attn.q_a_layernorm.weight",
    "q_up": "self_attn.q_b_proj.weight",
    "kv_down": "self_attn.kv_a_proj_with_mqa.weight",
    "kv_norm": "self_attn.kv_a_layernorm.weight",
    "kv_up": "self_attn.kv_b_proj.weight",
    "choice_bias": "mlp.gate.e_score_correction_bias",
    "shared_gate": "mlp.shared_experts.gate_proj.weight",
    "shared_up": "mlp.shared_experts.up_proj.weight",
    "shared_down": "mlp.shared_experts.down_proj.weight",
}
_GGUF = {
    **names.GGUF,
    "q_down": "attn_q_a.weight",
    "q_norm": "attn_q_a_norm.weight",
    "q_up": "attn_q_b.weight",
    "kv_down": "attn_kv_a_mqa.weight",
    "kv_norm": "attn_kv_a_norm.weight",
    "kv_up": "attn_kv_b.weight",
    "choice_bias": "exp_probs_b.bias",
}
_GGUF_HALVES = {"key_up": "attn_k_b.weight", "value_up": "attn_v_b.weight"}  # of kv_up, in newer files
_GGUF_READS = (
    "leading_dense_block_count", "expert_gating_func", "expert_weights_scale", "expert_group_count",
)  # fmt: skip
# GGUF files of before October 2025 have no key for groups: (groups, active ones) of v2 and v3, by their
# number of experts. The others have none.
_GROUPS = {160: (8, 3), 256: (8, 4)}
_SOFTMAX, _SIGMOID = 1, 2  # expert_gating_func


def config(source: TensorSource) -> ModelConfig:
    """ModelConfig from GGUF keys or from config.json."""
    meta = Metadata(source.metadata)
    if source.format == "gguf":
        return _from_gguf(meta, source)
    is_v3 = source.metadata["architectures"][0] == "DeepseekV3ForCausalLM"
    standard.refuse_bias(meta)
    for key, default, wanted in (
        ("hidden_act", "silu", "silu"), ("moe_layer_freq", 1, 1), ("rope_interleave", True, True),
        ("scoring_func", "sigmoid" if is_v3 else "softmax", "sigmoid" if is_v3 else "softmax"),
    ):  # fmt: skip
        if (value := meta.get(key, type(default), default)) != wanted:
            refuse(key, value, str(wanted).lower())
    latent = LatentConfig(
        rank=meta.need("kv_lora_rank", int), query_rank=meta.get("q_lora_rank", int, None),
        nope_dim=meta.need("qk_nope_head_dim", int), rope_dim=meta.need("qk_rope_head_dim", int),
        value_dim=meta.need("v_head_dim", int),
    )  # fmt: skip
    key = "rope_scaling" if meta.get("rope_scaling", dict, {}) else "rope_parameters"
    scaling = Metadata(meta.get(key, dict, {}))
    weight = scaling.get("mscale_all_dim", float, 0.0)
    num_layers = meta.need("num_hidden_layers", int)
    return _model(
        latent, rope_from_hf(meta, latent.rope_dim), num_layers,
        vocab_size=meta.need("vocab_size", int),
        hidden_size=meta.need("hidden_size", int),
        intermediate_size=meta.need("intermediate_size", int),
        num_heads=meta.need("num_attention_heads", int),
        rms_norm_eps=meta.get("rms_norm_eps", float, 1e-6),
        attention_scale=_scale(latent, scaling.need("factor", float) if weight else 1.0, weight),
        tie_embeddings=meta.get("tie_word_embeddings", bool, False),
        moe=_experts(meta, num_layers, is_v3),
    )  # fmt: skip


def _from_gguf(meta: Metadata, source: TensorSource) -> ModelConfig:
    """Newer files give the sizes of a head apart, because to llama.cpp latents are the keys and values."""
    at = "deepseek2."
    standard.refuse_unread(meta, "deepseek2", _GGUF_READS)
    rope_dim = meta.need(at + "rope.dimension_count", int)
    key_dim = meta.get(at + "attention.key_length_mla", int, None)
    value_dim = meta.get(at + "attention.value_length_mla", int, None)
    key_dim = key_dim or meta.need(at + "attention.key_length", int)
    latent = LatentConfig(
        rank=meta.need(at + "attention.kv_lora_rank", int),
        query_rank=meta.get(at + "attention.q_lora_rank", int, None), nope_dim=key_dim - rope_dim,
        rope_dim=rope_dim, value_dim=value_dim or meta.need(at + "attention.value_length", int),
    )  # fmt: skip
    factor = weight = 1.0
    if meta.get(at + "rope.scaling.type", str, "none") == "yarn":
        factor = meta.need(at + "rope.scaling.factor", float)
        # A tenth of config.json's mscale_all_dim, which the published models have for mscale too.
        weight = 10 * meta.need(at + "rope.scaling.yarn_log_multiplier", float)
    num_layers = meta.need(at + "block_count", int)
    tokens = meta.get(at + "vocab_size", int, 0) or len(meta.need("tokenizer.ggml.tokens", list))
    return _model(
        latent, rope_from_gguf(meta, source, "deepseek2", rope_dim, reads_multiplier=True), num_layers,
        vocab_size=tokens,
        hidden_size=meta.need(at + "embedding_length", int),
        intermediate_size=meta.need(at + "feed_forward_length", int),
        num_heads=meta.need(at + "attention.head_count", int),
        rms_norm_eps=meta.need(at + "attention.layer_norm_rms_epsilon", float),
        attention_scale=_scale(latent, factor, weight),
        tie_embeddings="output.weight" not in source.tensors,
        moe=_experts_from_gguf(meta, source, num_layers),
    )  # fmt: skip


def _model(latent: LatentConfig, rope: Rope, num_layers: int, **sizes: Any) -> ModelConfig:
    """What all of the family have, whatever the format."""
    return ModelConfig(
        family=name, num_kv_heads=1, head_dim=latent.rank + latent.rope_dim, rotary_dim=latent.rope_dim,
        max_position=rope.max_position, activation="silu", embedding_scale=None, qk_norm=False,
        post_norms=False, layers=standard.layers(num_layers, rope), latent=latent, **sizes,
    )  # fmt: skip


def _scale(latent: LatentConfig, factor: float, weight: float) -> float:
    """Of attention. With a `weight` YaRN's magnitude is in it, that of queries and that of keys."""
    return (latent.nope_dim + latent.rope_dim) ** -0.5 * yarn_magnitude(factor, weight) ** 2


def _experts(meta: Metadata, num_layers: int, is_v3: bool) -> MoEConfig:
    method = meta.get("topk_method", str, "noaux_tc" if is_v3 else "greedy")
    known = ("noaux_tc",) if is_v3 else ("greedy", "group_limited_greedy")
    if method not in known:
        refuse("topk_method", method, ", ".join(known))
    normalise = meta.get("norm_topk_prob", bool, is_v3)
    if normalise and not is_v3:  # the reference code and transformers disagree on it
        refuse("norm_topk_prob", normalise, "false")
    dense = _dense_layers(meta, "first_k_dense_replace", num_layers)
    groups = method != "greedy"
    width = meta.need("moe_intermediate_size", int)
    return MoEConfig(
        meta.need("n_routed_experts", int), meta.need("num_experts_per_tok", int), width, normalise=normalise,
        shared_size=width * meta.get("n_shared_experts", int, 0), shared_gate=False, sigmoid=is_v3,
        choice_bias=is_v3, num_groups=meta.get("n_group", int, 1) if groups else 1,
        active_groups=meta.get("topk_group", int, 1) if groups else 1,
        scale=meta.get("routed_scaling_factor", float, 1.0), dense_layers=dense,
    )  # fmt: skip


def _experts_from_gguf(meta: Metadata, source: TensorSource, num_layers: int) -> MoEConfig:
    at = "deepseek2."
    function = meta.get(at + "expert_gating_func", int, _SOFTMAX) or _SOFTMAX
    if function not in (_SOFTMAX, _SIGMOID):
        refuse(at + "expert_gating_func", function, f"{_SOFTMAX} (softmax), {_SIGMOID} (sigmoid)")
    normalise = meta.get(at + "expert_weights_norm", bool, False)
    if normalise and function == _SOFTMAX:  # see above
        refuse(at + "expert_weights_norm", normalise, "false with softmax")
    dense = _dense_layers(meta, at + "leading_dense_block_count", num_layers)
    count, width = meta.need(at + "expert_count", int), meta.need(at + "expert_feed_forward_length", int)
    groups, active = _GROUPS.get(count, (1, 1))
    if (told := meta.get(at + "expert_group_count", int, None)) is not None:
        groups, active = told or 1, meta.get(at + "expert_group_used_count", int, 0) or 1
    return MoEConfig(
        count, meta.need(at + "expert_used_count", int), width, normalise=normalise,
        shared_size=width * meta.get(at + "expert_shared_count", int, 0), shared_gate=False,
        sigmoid=function == _SIGMOID, choice_bias=f"blk.{dense}.{_GGUF['choice_bias']}" in source.tensors,
        num_groups=groups, active_groups=active,
        scale=meta.get(at + "expert_weights_scale", float, 0.0) or 1.0, dense_layers=dense,
    )  # fmt: skip


def _dense_layers(meta: Metadata, key: str, num_layers: int) -> int:
    if (dense := meta.get(key, int, 0)) >= num_layers:
        refuse(key, dense, f"less than the number of layers, {num_layers}")
    return dense


def rules(format: str, config: ModelConfig) -> list[WeightRule]:
    """Every parameter of the decoder, with its tensors' names in a file of `format`."""
    latent, moe = config.latent, config.moe
    assert latent is not None
    assert moe is not None
    L, N, H, V = config.num_layers, config.num_heads, config.hidden_size, config.vocab_size
    k = moe.dense_layers
    rank, nope, rope, value = latent.rank, latent.nope_dim, latent.rope_dim, latent.value_dim
    gguf = format == "gguf"
    n, at = (_GGUF, "blk.{}.") if gguf else (_HF, "model.layers.{}.")
    out: list[WeightRule] = []

    def stack(param: str, *parts: tuple[str, tuple[int, ...]], first: int = 0, last: int = L) -> None:
        """A parameter of layers `first` to `last`, of tensors by name and shape."""
        found = [Part((at + n[name]).format(i), shape) for i in range(first, last) for name, shape in parts]
        rows = sum(shape[0] for _, shape in parts)
        out.append(WeightRule(f"layers.{param}", (last - first, rows, *parts[0][1][1:]), tuple(found)))

    def turned(param: str, name: str, rows: int, columns: int, heads: int, kept: int) -> None:
        """Rows of RoPE, those after the first `kept` of a head, from pairs to halves."""
        size = rows // heads
        order = np.concatenate([np.arange(kept), np.arange(kept, size, 2), np.arange(kept + 1, size, 2)])
        part = Part(
            at + n[name], (rows, columns),
            lambda w: w.reshape(heads, size, columns)[:, order].reshape(rows, columns),
        )  # fmt: skip
        out.append(stack_layers(f"layers.{param}", L, [part]))

    def heads(param: str, shape: tuple[int, int], pick: standard.Transform) -> None:
        """One half of what makes keys and values of latents: a matrix for each head."""
        part = Part(
            at + n["kv_up"], (N * (nope + value), rank), lambda w: pick(w.reshape(N, nope + value, rank)),
            (N, *shape),
        )  # fmt: skip
        half = lambda i: Part(at.format(i) + _GGUF_HALVES[param], (N, *shape)) if gguf else None
        parts = tuple(replace(part, name=part.name.format(i), instead=half(i)) for i in range(L))
        out.append(WeightRule(f"layers.attention.{param}", (L, N, *shape), parts))

    def experts(param: str, rows: int, columns: int) -> None:
        name = at + n[f"expert_{param}"]
        each = range(moe.num_experts)
        if gguf:
            parts = [Part(name.format(i), (len(each), rows, columns)) for i in range(k, L)]
        else:
            parts = [Part(name.format(i, expert=e), (rows, columns)) for i in range(k, L) for e in each]
        shape = ((L - k) * len(each), rows, columns)
        out.append(WeightRule(f"layers.experts.{param}.weight", shape, tuple(parts)))

    def mlp(param: str, prefix: str, width: int, first: int, last: int) -> None:
        gate_up = [(prefix + half, (width, H)) for half in ("gate", "up")]
        stack(f"{param}.gate_up.weight", *gate_up, first=first, last=last)
        stack(f"{param}.down.weight", (f"{prefix}down", (H, width)), first=first, last=last)

    out.append(WeightRule("embedding.weight", (V, H), (Part(n["embedding"], (V, H)),)))
    stack("attention_norm.weight", ("attention_norm", (H,)))
    if latent.query_rank is not None:
        stack("attention.q_down.weight", ("q_down", (latent.query_rank, H)))
        stack("attention.q_norm.weight", ("q_norm", (latent.query_rank,)))
    q = "q" if latent.query_rank is None else "q_up"
    turned("attention.q.weight", q, N * (nope + rope), latent.query_rank or H, N, nope)
    turned("attention.kv_down.weight", "kv_down", rank + rope, H, 1, rank)
    stack("attention.kv_norm.weight", ("kv_norm", (rank,)))
    heads("key_up", (rank, nope), lambda w: w[:, :nope].swapaxes(1, 2))  # queries go to latents by it
    heads("value_up", (value, rank), lambda w: w[:, nope:])
    stack("attention.out.weight", ("out", (H, N * value)))
    stack("mlp_norm.weight", ("mlp_norm", (H,)))
    if k:
        mlp("dense", "", config.intermediate_size, 0, k)
    stack("experts.router.weight", ("router", (moe.num_experts, H)), first=k)
    if moe.choice_bias:
        stack("experts.choice_bias", ("choice_bias", (moe.num_experts,)), first=k)
    experts("gate", moe.expert_size, H)
    experts("up", moe.expert_size, H)
    experts("down", H, moe.expert_size)
    if moe.shared_size:
        mlp("experts.shared", "shared_", moe.shared_size, k, L)
    out.append(WeightRule("final_norm.weight", (H,), (Part(n["final_norm"], (H,)),)))
    if not config.tie_embeddings:
        out.append(WeightRule("lm_head.weight", (V, H), (Part(n["lm_head"], (V, H)),)))
    return out


def ignored(format: str, config: ModelConfig) -> frozenset[str]:
    """As usual, and what would be read twice or is not needed.

    That are in GGUF the halves of a matrix that is there as a whole; in Hugging Face's files the layer after
    the last, with which v3 guesses one more token.
    """
    if format == "gguf":
        halves = {f"blk.{i}.{half}" for i in range(config.num_layers) for half in _GGUF_HALVES.values()}
        return standard.ignored(format, config) | halves
    last = f"model.layers.{config.num_layers - 1}."
    layer = {part.name for rule in rules(format, config) for part in rule.parts if part.name.startswith(last)}
    kinds = {name.removeprefix(last) for name in layer} | {f"{name}.weight" for name in _PREDICTOR}
    return standard.ignored(format, config) | {f"model.layers.{config.num_layers}.{kind}" for kind in kinds}
