"""Every family's config.json in small, with the keys of the files on the hub. Plain data.

`matters` are changes of a config that must change the answers, with the same tensors: each shows that what
is tested there is on, and that a reader who overlooks the key is caught. None takes a key out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Config = dict[str, Any]


@dataclass(frozen=True)
class Case:
    config: Config
    matters: tuple[Config, ...] = ()


SIZES: Config = {
    "vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "bos_token_id": 1, "eos_token_id": 2,
    "torch_dtype": "float32", "use_cache": True, "attention_dropout": 0.0, "initializer_range": 0.02,
}  # fmt: skip


def config(architecture: str, model_type: str, **more: Any) -> Config:
    merged = {"architectures": [architecture], "model_type": model_type} | SIZES | more
    return {key: value for key, value in merged.items() if value is not ABSENT}


ABSENT = object()  # a key of SIZES that this family's files lack


def llama(**more: Any) -> Config:
    return config("LlamaForCausalLM", "llama", **{
        "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "pretraining_tp": 1,
        "rope_scaling": None, "tie_word_embeddings": False,
    } | more)  # fmt: skip


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 32, "rope_type": "llama3"}  # fmt: skip
LLAMA3_MATTERS = tuple(
    {"rope_scaling": value}
    for value in (None, LLAMA3 | {"factor": 4.0}, LLAMA3 | {"low_freq_factor": 0.5},
                  LLAMA3 | {"high_freq_factor": 8.0})
)  # fmt: skip
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}

GEMMA: Config = {
    "attention_bias": False, "head_dim": 32, "rms_norm_eps": 1e-6, "bos_token_id": 2, "eos_token_id": 1,
    "pad_token_id": 0,
}  # fmt: skip
GEMMA2 = config(
    "Gemma2ForCausalLM", "gemma2", **GEMMA,
    attn_logit_softcapping=2.0, final_logit_softcapping=2.5, cache_implementation="hybrid",
    hidden_act="gelu_pytorch_tanh", hidden_activation="gelu_pytorch_tanh", query_pre_attn_scalar=24,
    sliding_window=8,
)  # fmt: skip


def gemma3(**more: Any) -> Config:
    return config("Gemma3ForCausalLM", "gemma3_text", **GEMMA | {
        "attn_logit_softcapping": None, "final_logit_softcapping": None, "cache_implementation": "hybrid",
        "hidden_activation": "gelu_pytorch_tanh", "num_hidden_layers": 6, "query_pre_attn_scalar": 24,
        "rope_local_base_freq": 100.0, "rope_scaling": None, "rope_theta": 10000.0, "sliding_window": 8,
        "sliding_window_pattern": 3,
    } | more)  # fmt: skip


def phi3(**more: Any) -> Config:
    return config("Phi3ForCausalLM", "phi3", **{
        "attention_bias": False, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "hidden_act": "silu",
        "original_max_position_embeddings": 256, "pad_token_id": 0, "rope_scaling": None,
        "sliding_window": 12, "tie_word_embeddings": False,
    } | more)  # fmt: skip


LONGROPE = {
    "long_factor": [1.0, 1.5, 2.25, 3.0, 4.5, 6.0, 8.0, 9.5],
    "short_factor": [1.0, 1.05, 1.1, 1.25, 1.4, 1.75, 2.0, 2.5],
    "type": "longrope",
}
LONGROPE_12 = {  # a list holds half of the dimensions that turn: 0.75 of 16
    "long_factor": [1.0, 1.5, 2.5, 4.0, 6.5, 9.0],
    "short_factor": [1.0, 1.1, 1.2, 1.5, 1.75, 2.25],
    "type": "longrope",
}


def qwen2(**more: Any) -> Config:
    return config("Qwen2ForCausalLM", "qwen2", **{
        "hidden_act": "silu", "rms_norm_eps": 1e-6, "max_window_layers": 4, "sliding_window": 8,
        "use_sliding_window": False, "tie_word_embeddings": True,
    } | more)  # fmt: skip


QWEN_MOE: Config = {
    "decoder_sparse_step": 1, "hidden_act": "silu", "max_window_layers": 4, "mlp_only_layers": [],
    "moe_intermediate_size": 48, "num_experts": 8, "num_experts_per_tok": 3, "output_router_logits": False,
    "rms_norm_eps": 1e-6, "router_aux_loss_coef": 0.001, "use_sliding_window": False,
    "tie_word_embeddings": False,
}  # fmt: skip


def qwen3_moe(**more: Any) -> Config:
    return config("Qwen3MoeForCausalLM", "qwen3_moe", **QWEN_MOE | {
        "attention_bias": False, "head_dim": 32, "norm_topk_prob": True, "rope_scaling": None,
        "sliding_window": None,
    } | more)  # fmt: skip


def gpt_oss(**more: Any) -> Config:
    return config("GptOssForCausalLM", "gpt_oss", **{
        "attention_bias": True, "experts_per_token": 3, "head_dim": 16, "hidden_act": "silu",
        "initial_context_length": 32,
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_experts_per_tok": 3,
        "num_local_experts": 8, "output_router_logits": False, "pad_token_id": 0,
        "rope_scaling": {"beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
                         "original_max_position_embeddings": 32, "rope_type": "yarn", "truncate": False},
        "rope_theta": 150000, "router_aux_loss_coef": 0.9, "sliding_window": 8, "swiglu_limit": 7.0,
        "tie_word_embeddings": False,
    } | more)  # fmt: skip


MXFP4 = {
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens",
                               "lm_head"],
    "quant_method": "mxfp4",
}  # fmt: skip

DEEPSEEK: Config = {
    "attention_bias": False, "first_k_dense_replace": 1, "hidden_act": "silu", "kv_lora_rank": 32,
    "moe_intermediate_size": 48, "moe_layer_freq": 1, "n_routed_experts": 8, "num_experts_per_tok": 3,
    "num_key_value_heads": 4, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False, "v_head_dim": 12,
}  # fmt: skip


def deepseek_yarn(mscale: float) -> Config:
    return {"beta_fast": 32, "beta_slow": 1, "factor": 8, "mscale": mscale, "mscale_all_dim": mscale,
            "original_max_position_embeddings": 32, "type": "yarn"}  # fmt: skip


def deepseek_v2(**more: Any) -> Config:
    return config("DeepseekV2ForCausalLM", "deepseek_v2", **DEEPSEEK | {
        "aux_loss_alpha": 0.001, "ep_size": 1, "n_group": 1, "n_shared_experts": 2, "norm_topk_prob": False,
        "q_lora_rank": None, "rope_scaling": deepseek_yarn(0.707), "routed_scaling_factor": 1.0,
        "scoring_func": "softmax", "seq_aux": True, "topk_group": 1, "topk_method": "greedy",
    } | more)  # fmt: skip


CASES: dict[str, Case] = {
    "llama": Case(llama(), ({"rope_theta": 500.0}, {"rms_norm_eps": 0.1})),
    "llama-biases": Case(llama(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "llama-llama3": Case(llama(rope_scaling=LLAMA3, head_dim=16), LLAMA3_MATTERS),
    "llama-rope-parameters": Case(
        llama(rope_scaling=ABSENT, rope_theta=ABSENT, torch_dtype=ABSENT, dtype="float32", head_dim=16,
              rope_parameters=LLAMA3 | {"rope_theta": 10000.0}),
        ({"rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}},),
    ),
    "llama-linear": Case(llama(rope_scaling={"type": "linear", "factor": 4.0}), ({"rope_scaling": None},)),
    "llama-dynamic": Case(
        llama(rope_scaling={"type": "dynamic", "factor": 4.0}, max_position_embeddings=32),
        ({"rope_scaling": None}, {"max_position_embeddings": 48}),
    ),
    "llama-yarn": Case(
        llama(rope_scaling=YARN, max_position_embeddings=128),
        ({"rope_scaling": None}, {"rope_scaling": YARN | {"beta_slow": 2.0}},
         {"rope_scaling": YARN | {"attention_factor": 1.0}}),
    ),
    "mistral": Case(
        config("MistralForCausalLM", "mistral", hidden_act="silu", sliding_window=10,
               tie_word_embeddings=False),
        ({"sliding_window": None}, {"sliding_window": 11}, {"sliding_window": 9}),
    ),
    "mixtral": Case(
        config("MixtralForCausalLM", "mixtral", hidden_act="silu", num_experts_per_tok=2,
               num_local_experts=8, output_router_logits=False, router_aux_loss_coef=0.02,
               sliding_window=None, tie_word_embeddings=False),
        ({"num_experts_per_tok": 1},),
    ),
    "qwen2": Case(qwen2()),
    "qwen2-window": Case(
        qwen2(use_sliding_window=True, max_window_layers=2, tie_word_embeddings=False),
        ({"use_sliding_window": False}, {"max_window_layers": 1}),
    ),
    "qwen2-moe": Case(
        config("Qwen2MoeForCausalLM", "qwen2_moe", **QWEN_MOE, norm_topk_prob=False,
               shared_expert_intermediate_size=72, sliding_window=8),
        ({"norm_topk_prob": True}, {"num_experts_per_tok": 2}),
    ),
    "qwen3": Case(
        config("Qwen3ForCausalLM", "qwen3", attention_bias=False, head_dim=32, hidden_act="silu",
               max_window_layers=4, rms_norm_eps=1e-6, rope_scaling=None, sliding_window=None,
               tie_word_embeddings=True, use_sliding_window=False),
    ),
    "qwen3-moe": Case(qwen3_moe(), ({"norm_topk_prob": False}, {"num_experts_per_tok": 2})),
    "qwen3-moe-mixed": Case(qwen3_moe(decoder_sparse_step=2, mlp_only_layers=[1], num_hidden_layers=6)),
    "gemma": Case(
        config("GemmaForCausalLM", "gemma", **GEMMA, hidden_act="gelu", num_key_value_heads=1),
        ({"hidden_act": "silu"},),
    ),
    "gemma2": Case(
        GEMMA2,
        ({"attn_logit_softcapping": None}, {"final_logit_softcapping": None}, {"sliding_window": 9},
         {"query_pre_attn_scalar": 32}),
    ),
    "gemma3": Case(
        gemma3(),
        ({"sliding_window": 9}, {"sliding_window_pattern": 2}, {"rope_local_base_freq": 10000.0},
         {"rope_theta": 1000.0}, {"query_pre_attn_scalar": 32}),
    ),
    "gemma3-linear": Case(
        gemma3(rope_scaling={"factor": 8.0, "rope_type": "linear"}, num_key_value_heads=1),
        ({"rope_scaling": None},),
    ),
    "gemma3-rope-parameters": Case(
        gemma3(rope_local_base_freq=ABSENT, rope_scaling=ABSENT, rope_theta=ABSENT, torch_dtype=ABSENT,
               dtype="float32", sliding_window_pattern=ABSENT, cache_implementation=ABSENT,
               _sliding_window_pattern=3, use_bidirectional_attention=False,
               layer_types=["sliding_attention", "full_attention", "full_attention"] * 2,
               rope_parameters={
                   "full_attention": {"factor": 8.0, "rope_theta": 10000.0, "rope_type": "linear"},
                   "sliding_attention": {"rope_theta": 100.0, "rope_type": "default"},
               }),
        ({"layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2},),
    ),
    "phi3": Case(phi3(num_key_value_heads=4), ({"sliding_window": None}, {"sliding_window": 13})),
    "phi3-longrope": Case(
        phi3(rope_scaling=LONGROPE, original_max_position_embeddings=32, max_position_embeddings=128,
             sliding_window=200),
        ({"rope_scaling": None}, {"max_position_embeddings": 64},
         {"rope_scaling": LONGROPE | {"long_factor": LONGROPE["short_factor"]}}),
    ),
    "phi4-mini": Case(
        phi3(rope_scaling=LONGROPE_12, original_max_position_embeddings=32, max_position_embeddings=128,
             partial_rotary_factor=0.75, sliding_window=200, tie_word_embeddings=True,
             full_attn_mod=1, interpolate_factor=1, mlp_bias=False, lm_head_bias=False),
        ({"rope_scaling": None}, {"rope_scaling": None, "partial_rotary_factor": 1.0}),
    ),
    "olmo2": Case(
        config("Olmo2ForCausalLM", "olmo2", attention_bias=False, hidden_act="silu", pad_token_id=0,
               rms_norm_eps=1e-6, rope_scaling=None, tie_word_embeddings=False),
    ),
    "granite": Case(
        config("GraniteForCausalLM", "granite", attention_bias=False, attention_multiplier=0.125,
               embedding_multiplier=3.0, hidden_act="silu", logits_scaling=0.5, mlp_bias=False,
               residual_multiplier=0.6, rope_scaling=None, tie_word_embeddings=True),
        ({"attention_multiplier": 0.25}, {"embedding_multiplier": 1.0}, {"logits_scaling": 1.0},
         {"residual_multiplier": 1.0}),
    ),
    "smollm3": Case(
        config("SmolLM3ForCausalLM", "smollm3", attention_bias=False, hidden_act="silu",
               layer_types=["full_attention"] * 4, max_window_layers=28, mlp_bias=False,
               no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0], pad_token_id=0, pretraining_tp=2,
               rms_norm_eps=1e-6, rope_scaling=None, sliding_window=None, tie_word_embeddings=True,
               use_sliding_window=False),
        ({"no_rope_layers": [1, 1, 1, 1]}, {"no_rope_layers": [0, 0, 0, 1]}),
    ),
    "gpt-oss": Case(
        gpt_oss(),
        ({"sliding_window": 9}, {"layer_types": ["full_attention"] * 4}, {"num_experts_per_tok": 2},
         {"rope_scaling": None}, {"swiglu_limit": 100.0},
         {"rope_scaling": gpt_oss()["rope_scaling"] | {"truncate": True}}),
    ),
    "gpt-oss-mxfp4": Case(gpt_oss(quantization_config=MXFP4)),
    "deepseek-v2-lite": Case(
        deepseek_v2(),
        ({"rope_scaling": None}, {"rope_scaling": deepseek_yarn(1.0)}, {"num_experts_per_tok": 2}),
    ),
    "deepseek-v2": Case(
        deepseek_v2(n_group=4, topk_group=2, topk_method="group_limited_greedy", q_lora_rank=24,
                    routed_scaling_factor=2.0),
        ({"topk_method": "greedy"}, {"topk_group": 3}, {"routed_scaling_factor": 1.0}),
    ),
    "deepseek-v3": Case(
        config("DeepseekV3ForCausalLM", "deepseek_v3", **DEEPSEEK | {"n_routed_experts": 12},
               ep_size=1, n_group=3, n_shared_experts=1, norm_topk_prob=True, num_nextn_predict_layers=1,
               q_lora_rank=24, rope_scaling=deepseek_yarn(1.0), routed_scaling_factor=2.5,
               scoring_func="sigmoid", topk_group=2, topk_method="noaux_tc"),
        ({"norm_topk_prob": False}, {"topk_group": 3}, {"n_group": 1, "topk_group": 1},
         {"routed_scaling_factor": 1.0}, {"rope_scaling": deepseek_yarn(0.707)}),
    ),
}  # fmt: skip
