"""A Hugging Face model as the GGUF file that llama.cpp's convert_hf_to_gguf.py makes of it.

Names of tensors and keys are those of the gguf package; what is done to tensors, and which keys a family
gets, is told here once more after that script (github.com/ggml-org/llama.cpp), not taken from the code under
test.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import MODEL_ARCH

from tests.models.tiny import permute
from tests.weights.conftest import byte_level_vocabulary

Tensors = dict[str, np.ndarray]

ARCHITECTURES = {
    "LlamaForCausalLM": MODEL_ARCH.LLAMA,
    "MistralForCausalLM": MODEL_ARCH.LLAMA,
    "MixtralForCausalLM": MODEL_ARCH.LLAMA,
    "Qwen2ForCausalLM": MODEL_ARCH.QWEN2,
    "Qwen2MoeForCausalLM": MODEL_ARCH.QWEN2MOE,
    "Qwen3ForCausalLM": MODEL_ARCH.QWEN3,
    "Qwen3MoeForCausalLM": MODEL_ARCH.QWEN3MOE,
    "GemmaForCausalLM": MODEL_ARCH.GEMMA,
    "Gemma2ForCausalLM": MODEL_ARCH.GEMMA2,
    "Gemma3ForCausalLM": MODEL_ARCH.GEMMA3,
    "Phi3ForCausalLM": MODEL_ARCH.PHI3,
    "Olmo2ForCausalLM": MODEL_ARCH.OLMO2,
    "GraniteForCausalLM": MODEL_ARCH.GRANITE,
    "SmolLM3ForCausalLM": MODEL_ARCH.SMOLLM3,
    "GptOssForCausalLM": MODEL_ARCH.GPT_OSS,
    "DeepseekV2ForCausalLM": MODEL_ARCH.DEEPSEEK2,
    "DeepseekV3ForCausalLM": MODEL_ARCH.DEEPSEEK2,
}
GEMMAS = (MODEL_ARCH.GEMMA, MODEL_ARCH.GEMMA2, MODEL_ARCH.GEMMA3)
LLAMAS = (MODEL_ARCH.LLAMA, MODEL_ARCH.GRANITE, MODEL_ARCH.SMOLLM3)  # derived from its LlamaModel
EXPERT = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(\d+)\.(\w+)\.weight")
GPT_OSS_EXPERTS = re.compile(
    r"model\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj(_bias|_blocks|_scales|)"
)
PRE_TOKENIZERS = {MODEL_ARCH.GPT_OSS: "gpt-4o", MODEL_ARCH.DEEPSEEK2: "deepseek-v3"}
W = {"w1": "gate", "w2": "down", "w3": "up", "gate_proj": "gate", "down_proj": "down", "up_proj": "up"}


def write(
    path: Path,
    config: Mapping[str, Any],
    tensors: Tensors,
    *,
    single_experts: bool = False,
    whole_latents: bool = False,
    parts: int = 1,
    pairs: Mapping[str, bool | int | float] = {},
) -> Path:
    """Write the model to `path`; returns it, or the first of `parts` files beside it.

    `single_experts`: one tensor an expert, as before April 2024. `whole_latents`: deepseek as before April
    2025. `pairs` are further keys.
    """
    arch = ARCHITECTURES[config["architectures"][0]]
    converted = _tensors(arch, config, tensors, single_experts, whole_latents)
    per_part = -(-len(converted) // parts) if parts > 1 else 0
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch], split_max_tensors=per_part)
    _sizes(writer, arch, config)
    if arch == MODEL_ARCH.DEEPSEEK2:
        _deepseek(writer, config, whole_latents)
    _rope(writer, arch, config)
    _family(writer, arch, config)
    _tokenizer(writer, config["vocab_size"], PRE_TOKENIZERS.get(arch, "llama-bpe"))
    for key, value in pairs.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32}[type(value)]
        add(key, value)
    for name, values in converted.items():
        if values.dtype == np.uint8:
            writer.add_tensor(name, values, raw_dtype=gguf.GGMLQuantizationType.MXFP4)
        else:
            writer.add_tensor(name, np.ascontiguousarray(values, np.float32))
    for step in (writer.write_header_to_file, writer.write_kv_data_to_file, writer.write_tensors_to_file):
        step()
    writer.close()
    return path if parts == 1 else path.with_name(f"{path.stem}-00001-of-{parts:05d}.gguf")


def _head_dim(config: Mapping[str, Any]) -> int:
    return config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]


def _tensors(
    arch: MODEL_ARCH, config: Mapping[str, Any], tensors: Tensors, single_experts: bool, whole_latents: bool
) -> Tensors:
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    out: Tensors = {}
    experts: dict[str, dict[int, np.ndarray]] = {}
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    for name, values in tensors.items():
        if match := EXPERT.fullmatch(name):
            kind = f"blk.{match[1]}.ffn_{W[match[3]]}"
            if single_experts:
                out[f"{kind}.{match[2]}.weight"] = values
            else:
                experts.setdefault(f"{kind}_exps.weight", {})[int(match[2])] = values
            continue
        if match := GPT_OSS_EXPERTS.fullmatch(name):
            out |= _gpt_oss_experts(match, values, tensors)
            continue
        if name.endswith("kv_b_proj.weight") and not whole_latents:
            out |= _latent_halves(config, names, name, values)
            continue
        name = name.replace(".e_score_correction_bias", ".e_score_correction.bias")
        name += ".weight" * name.endswith(".sinks")
        if arch in LLAMAS and ".q_proj." in name:
            values = permute(values, heads)
        elif arch in LLAMAS and ".k_proj." in name:
            values = permute(values, kv_heads)
        elif arch in GEMMAS and name.endswith("norm.weight"):
            values = values + 1
        new = names.get_name(name, try_suffixes=(".weight", ".bias"))
        assert new is not None, f"{arch.name} has no place for {name}"
        out[new] = values
    for name, by_number in experts.items():
        out[name] = np.stack([by_number[i] for i in range(len(by_number))])
    return out | _rope_tensors(config)


def _gpt_oss_experts(match: re.Match[str], values: np.ndarray, tensors: Tensors) -> Tensors:
    """Experts [E, in, out], their biases or their blocks; rows of gate and up are in turns."""
    layer, kind, form = match.groups()
    if form == "_scales":  # goes with its blocks
        return {}
    if form == "_blocks":
        values = _mxfp4(values, tensors[match[0].replace("_blocks", "_scales")])
    elif not form:
        values = values.swapaxes(1, 2)
    halves = {"gate": values[:, 0::2], "up": values[:, 1::2]} if kind == "gate_up" else {"down": values}
    end = "bias" if form == "_bias" else "weight"
    return {f"blk.{layer}.ffn_{half}_exps.{end}": np.ascontiguousarray(x) for half, x in halves.items()}


def _mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """[E, out, groups, 16] with neighbours in a byte to ggml's: scale, then value i beside value i + 16."""
    codes = np.stack([blocks & 15, blocks >> 4], axis=-1).reshape(*scales.shape, 32)
    packed = codes[..., :16] | codes[..., 16:] << 4
    return np.concatenate([scales[..., None], packed], axis=-1).reshape(*scales.shape[:2], -1)


def _latent_halves(
    config: Mapping[str, Any], names: gguf.TensorNameMap, name: str, values: np.ndarray
) -> Tensors:
    """What makes keys of latents, transposed, and what makes values, a matrix for each head."""
    nope, rank = config["qk_nope_head_dim"], config["kv_lora_rank"]
    heads = values.reshape(config["num_attention_heads"], nope + config["v_head_dim"], rank)
    halves = {"k_b_proj": heads[:, :nope].swapaxes(1, 2), "v_b_proj": heads[:, nope:]}
    return {
        str(names.get_name(name.replace("kv_b_proj", half), try_suffixes=(".weight",))): x
        for half, x in halves.items()
    }


def _rope_tensors(config: Mapping[str, Any]) -> Tensors:
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "longrope":
        return {
            f"rope_factors_{one}.weight": np.float32(scaling[f"{one}_factor"]) for one in ("long", "short")
        }
    if kind != "llama3":
        return {}
    theta = config.get("rope_theta") or scaling["rope_theta"]
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    factors, dim = [], _head_dim(config)
    for i in range(0, dim, 2):
        wavelen = 2 * math.pi * theta ** (i / dim)
        smooth = (original / wavelen - low) / (high - low)
        between = 1 / ((1 - smooth) / factor + smooth)
        factors.append(1 if wavelen < original / high else factor if wavelen > original / low else between)
    return {"rope_freqs.weight": np.float32(factors)}


def _sizes(writer: gguf.GGUFWriter, arch: MODEL_ARCH, config: Mapping[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    if arch != MODEL_ARCH.DEEPSEEK2:
        writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    if "head_dim" in config:
        writer.add_key_length(config["head_dim"])
        writer.add_value_length(config["head_dim"])
    if experts := config.get("num_local_experts", config.get("num_experts", config.get("n_routed_experts"))):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if arch in LLAMAS:
        writer.add_vocab_size(config["vocab_size"])


def _deepseek(writer: gguf.GGUFWriter, config: Mapping[str, Any], whole_latents: bool) -> None:
    """Latents are keys and values to llama.cpp, with one head; before, they were made into those of all."""
    rank, rope = config["kv_lora_rank"], config["qk_rope_head_dim"]
    key, value = config["qk_nope_head_dim"] + rope, config["v_head_dim"]
    writer.add_kv_lora_rank(rank)
    if config["q_lora_rank"] is not None:
        writer.add_q_lora_rank(config["q_lora_rank"])
    writer.add_head_count_kv(config["num_attention_heads"] if whole_latents else 1)
    writer.add_key_length(key if whole_latents else rank + rope)
    writer.add_value_length(value if whole_latents else rank)
    if not whole_latents:
        writer.add_key_length_mla(key)
        writer.add_value_length_mla(value)
        writer.add_expert_group_count(config["n_group"])
        writer.add_expert_group_used_count(config["topk_group"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    if config["norm_topk_prob"]:
        writer.add_expert_weights_norm(True)
    if config["scoring_func"] == "sigmoid" or not whole_latents:
        functions = {
            "sigmoid": gguf.ExpertGatingFuncType.SIGMOID,
            "softmax": gguf.ExpertGatingFuncType.SOFTMAX,
        }
        writer.add_expert_gating_func(functions[config["scoring_func"]])
    writer.add_rope_dimension_count(rope)
    writer.add_rope_scaling_yarn_log_mul(0.1 * config["rope_scaling"]["mscale_all_dim"])


def _rope(writer: gguf.GGUFWriter, arch: MODEL_ARCH, config: Mapping[str, Any]) -> None:
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    scaling = scaling.get("full_attention", scaling)
    if arch not in (MODEL_ARCH.GEMMA, MODEL_ARCH.GEMMA2):
        writer.add_rope_freq_base(config.get("rope_theta") or scaling["rope_theta"])
    if arch in LLAMAS:
        writer.add_rope_dimension_count(_head_dim(config))
    kind = scaling.get("rope_type", scaling.get("type"))
    if kind == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])
    elif kind == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(scaling["factor"])
        writer.add_rope_scaling_orig_ctx_len(scaling["original_max_position_embeddings"])
        if "beta_fast" in scaling:
            writer.add_rope_scaling_yarn_beta_fast(scaling["beta_fast"])
            writer.add_rope_scaling_yarn_beta_slow(scaling["beta_slow"])
    elif kind == "longrope":
        original = config["original_max_position_embeddings"]
        scale = config["max_position_embeddings"] / original
        writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale) / math.log(original)))
    else:
        assert kind in (None, "default", "llama3"), f"GGUF has no {kind} RoPE"


def _family(writer: gguf.GGUFWriter, arch: MODEL_ARCH, config: Mapping[str, Any]) -> None:
    match arch:
        case MODEL_ARCH.QWEN2MOE:
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
            writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
        case MODEL_ARCH.QWEN3MOE:
            writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
        case MODEL_ARCH.GEMMA2:
            writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
            writer.add_final_logit_softcapping(config["final_logit_softcapping"])
            writer.add_sliding_window(config["sliding_window"])
        case MODEL_ARCH.GEMMA3:
            writer.add_sliding_window(config["sliding_window"])
            writer.add_sliding_window_pattern(config["sliding_window_pattern"])
            local = config.get("rope_parameters", {}).get("sliding_attention", {}).get("rope_theta")
            writer.add_rope_freq_base_swa(local or config["rope_local_base_freq"])
        case MODEL_ARCH.PHI3:
            part = config.get("partial_rotary_factor", 1.0)
            writer.add_rope_dimension_count(
                int(part * config["hidden_size"]) // config["num_attention_heads"]
            )
            writer.add_rope_scaling_orig_ctx_len(config["original_max_position_embeddings"])
            writer.add_sliding_window(config["sliding_window"] or 0)
        case MODEL_ARCH.GPT_OSS:
            writer.add_sliding_window(config["sliding_window"])
            writer.add_expert_feed_forward_length(config["intermediate_size"])
        case MODEL_ARCH.GRANITE:
            writer.add_attention_scale(config["attention_multiplier"])
            writer.add_embedding_scale(config["embedding_multiplier"])
            writer.add_residual_scale(config["residual_multiplier"])
            writer.add_logit_scale(config["logits_scaling"])


def _tokenizer(writer: gguf.GGUFWriter, size: int, pre: str) -> None:
    tokens = [*byte_level_vocabulary()[: size - 3], "he", "<|start|>", "<|end|>"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.NORMAL] * (size - 2) + [gguf.TokenType.CONTROL] * 2)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(size - 2)
    writer.add_eos_token_id(size - 1)
