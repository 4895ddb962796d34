"""The deepseek family: v2 and v3, and what has their wiring (Moonlight, Kimi-K2)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from jaxserve.models import standard
from jaxserve.models.config import LatentConfig, ModelConfig, MoEConfig
from jaxserve.models.family import Part, WeightRule, stack_layers
from jaxserve.models.metadata import Metadata, refuse
from jaxserve.models.rope_metadata import rope_from_hf
from jaxserve.models.rope_scaling import yarn_magnitude
from jaxserve.weights.source import TensorSource

name = "deepseek"
gguf_architectures = ()
hf_architectures = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM")

_PREDICTOR = ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head")


def config(source: TensorSource) -> ModelConfig:
    """ModelConfig from config.json."""
    meta = Metadata(source.metadata)
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
    rope = rope_from_hf(meta, latent.rope_dim)
    num_layers = meta.need("num_hidden_layers", int)
    return ModelConfig(
        family=name,
        vocab_size=meta.need("vocab_size", int),
        hidden_size=meta.need("hidden_size", int),
        intermediate_size=meta.need("intermediate_size", int),
        num_heads=meta.need("num_attention_heads", int),
        num_kv_heads=1,
        head_dim=latent.rank + latent.rope_dim,
        rotary_dim=latent.rope_dim,
        max_position=rope.max_position,
        rms_norm_eps=meta.get("rms_norm_eps", float, 1e-6),
        attention_scale=_scale(meta, latent),
        activation="silu",
        tie_embeddings=meta.get("tie_word_embeddings", bool, False),
        embedding_scale=None,
        qk_norm=False,
        post_norms=False,
        layers=standard.layers(num_layers, rope),
        moe=_experts(meta, num_layers, is_v3),
        latent=latent,
    )


def _scale(meta: Metadata, latent: LatentConfig) -> float:
    """Of attention. With `mscale_all_dim` YaRN's magnitude is in it, that of queries and that of keys."""
    key = "rope_scaling" if meta.get("rope_scaling", dict, {}) else "rope_parameters"
    scaling = Metadata(meta.get(key, dict, {}))
    weight, scale = scaling.get("mscale_all_dim", float, 0.0), (latent.nope_dim + latent.rope_dim) ** -0.5
    if weight:
        scale *= yarn_magnitude(scaling.need("factor", float), weight) ** 2
    return scale


def _experts(meta: Metadata, num_layers: int, is_v3: bool) -> MoEConfig:
    method = meta.get("topk_method", str, "noaux_tc" if is_v3 else "greedy")
    known = ("noaux_tc",) if is_v3 else ("greedy", "group_limited_greedy")
    if method not in known:
        refuse("topk_method", method, ", ".join(known))
    normalise = meta.get("norm_topk_prob", bool, is_v3)
    if normalise and not is_v3:  # the reference code and transformers disagree on it
        refuse("norm_topk_prob", normalise, "false")
    if (dense := meta.get("first_k_dense_replace", int, 0)) >= num_layers:
        refuse("first_k_dense_replace", dense, f"less than num_hidden_layers, {num_layers}")
    groups = method != "greedy"
    width = meta.need("moe_intermediate_size", int)
    return MoEConfig(
        meta.need("n_routed_experts", int), meta.need("num_experts_per_tok", int), width, normalise=normalise,
        shared_size=width * meta.get("n_shared_experts", int, 0), shared_gate=False, sigmoid=is_v3,
        choice_bias=is_v3, num_groups=meta.get("n_group", int, 1) if groups else 1,
        active_groups=meta.get("topk_group", int, 1) if groups else 1,
        scale=meta.get("routed_scaling_factor", float, 1.0), dense_layers=dense,
    )  # fmt: skip


def rules(format: str, config: ModelConfig) -> list[WeightRule]:
    """Every parameter of the decoder, with its tensors' names."""
    latent, moe = config.latent, config.moe
    assert latent is not None
    assert moe is not None
    L, N, H, V = config.num_layers, config.num_heads, config.hidden_size, config.vocab_size
    k = moe.dense_layers
    rank, nope, rope, value = latent.rank, latent.nope_dim, latent.rope_dim, latent.value_dim
    out: list[WeightRule] = []

    def stack(param: str, *parts: tuple[str, tuple[int, ...]], first: int = 0, last: int = L) -> None:
        """A parameter of layers `first` to `last`, of tensors by name and shape."""
        found = [Part(f"model.layers.{i}.{name}", shape) for i in range(first, last) for name, shape in parts]
        rows = sum(shape[0] for _, shape in parts)
        out.append(WeightRule(f"layers.{param}", (last - first, rows, *parts[0][1][1:]), tuple(found)))

    def turned(param: str, name: str, rows: int, columns: int, heads: int, kept: int) -> None:
        """Rows of RoPE, those after the first `kept` of a head, from pairs to halves."""
        size = rows // heads
        order = np.concatenate([np.arange(kept), np.arange(kept, size, 2), np.arange(kept + 1, size, 2)])
        part = Part(
            f"model.layers.{{}}.{name}", (rows, columns),
            lambda w: w.reshape(heads, size, columns)[:, order].reshape(rows, columns),
        )  # fmt: skip
        out.append(stack_layers(f"layers.{param}", L, [part]))

    def heads(param: str, shape: tuple[int, int], pick: standard.Transform) -> None:
        """One half of what makes keys and values of latents: a matrix for each head."""
        name = "model.layers.{}.self_attn.kv_b_proj.weight"
        part = Part(
            name, (N * (nope + value), rank), lambda w: pick(w.reshape(N, nope + value, rank)), (N, *shape)
        )
        parts = tuple(replace(part, name=name.format(i)) for i in range(L))
        out.append(WeightRule(f"layers.attention.{param}", (L, N, *shape), parts))

    def experts(param: str, name: str, rows: int, columns: int) -> None:
        parts = tuple(
            Part(f"model.layers.{i}.mlp.experts.{e}.{name}.weight", (rows, columns))
            for i in range(k, L) for e in range(moe.num_experts)
        )  # fmt: skip
        out.append(WeightRule(f"layers.experts.{param}.weight", (len(parts), rows, columns), parts))

    def mlp(param: str, name: str, width: int, first: int, last: int) -> None:
        gate_up = [(f"{name}.{half}.weight", (width, H)) for half in ("gate_proj", "up_proj")]
        stack(f"{param}.gate_up.weight", *gate_up, first=first, last=last)
        stack(f"{param}.down.weight", (f"{name}.down_proj.weight", (H, width)), first=first, last=last)

    out.append(WeightRule("embedding.weight", (V, H), (Part("model.embed_tokens.weight", (V, H)),)))
    stack("attention_norm.weight", ("input_layernorm.weight", (H,)))
    q = "q_proj"
    if latent.query_rank is not None:
        q = "q_b_proj"
        stack("attention.q_down.weight", ("self_attn.q_a_proj.weight", (latent.query_rank, H)))
        stack("attention.q_norm.weight", ("self_attn.q_a_layernorm.weight", (latent.query_rank,)))
    turned("attention.q.weight", f"self_attn.{q}.weight", N * (nope + rope), latent.query_rank or H, N, nope)
    turned("attention.kv_down.weight", "self_attn.kv_a_proj_with_mqa.weight", rank + rope, H, 1, rank)
    stack("attention.kv_norm.weight", ("self_attn.kv_a_layernorm.weight", (rank,)))
    heads("key_up", (rank, nope), lambda w: w[:, :nope].swapaxes(1, 2))  # queries go to latents by it
    heads("value_up", (value, rank), lambda w: w[:, nope:])
    stack("attention.out.weight", ("self_attn.o_proj.weight", (H, N * value)))
    stack("mlp_norm.weight", ("post_attention_layernorm.weight", (H,)))
    if k:
        mlp("dense", "mlp", config.intermediate_size, 0, k)
    stack("experts.router.weight", ("mlp.gate.weight", (moe.num_experts, H)), first=k)
    if moe.choice_bias:
        stack("experts.choice_bias", ("mlp.gate.e_score_correction_bias", (moe.num_experts,)), first=k)
    experts("gate", "gate_proj", moe.expert_size, H)
    experts("up", "up_proj", moe.expert_size, H)
    experts("down", "down_proj", H, moe.expert_size)
    if moe.shared_size:
        mlp("experts.shared", "mlp.shared_experts", moe.shared_size, k, L)
    out.append(WeightRule("final_norm.weight", (H,), (Part("model.norm.weight", (H,)),)))
    if not config.tie_embeddings:
        out.append(WeightRule("lm_head.weight", (V, H), (Part("lm_head.weight", (V, H)),)))
    return out


def ignored(format: str, config: ModelConfig) -> frozenset[str]:
    """As usual, and the layer after the last, with which v3 guesses one more token."""
    last = f"model.layers.{config.num_layers - 1}."
    layer = {part.name for rule in rules(format, config) for part in rule.parts if part.name.startswith(last)}
    names = {name.removeprefix(last) for name in layer} | {f"{name}.weight" for name in _PREDICTOR}
    return standard.ignored(format, config) | {f"model.layers.{config.num_layers}.{name}" for name in names}
