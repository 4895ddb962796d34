"""Tiny random models of both families: config.json and tensors, and the same model as a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
from safetensors.numpy import save_file

from jaxserve.weights.source import TensorInfo

Tensors = dict[str, np.ndarray]
VOCAB, HIDDEN, MLP = 48, 32, 40

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
}
GEMMA3: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000.0,
    "rope_local_base_freq": 10_000.0,
    "sliding_window": 5,
    "sliding_window_pattern": 6,
    "query_pre_attn_scalar": 16,
    "hidden_activation": "gelu_pytorch_tanh",
}
CONFIGS = {"llama": LLAMA, "gemma3": GEMMA3}


@dataclass
class Source:
    """A TensorSource that has a description and shapes, no data."""

    format: Literal["gguf", "safetensors"]
    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo] = field(default_factory=dict)
    path: Path = Path("model")

    def read(self, name: str) -> np.ndarray:
        raise AssertionError("a config is read from the description alone")

    def read_rows(self, name: str, start: int, stop: int) -> np.ndarray:
        raise AssertionError("a config is read from the description alone")

    def close(self) -> None: ...


def hf_tensors(config: Mapping[str, Any], seed: int = 0) -> Tensors:
    """Random tensors as transformers names and shapes them."""
    rng = np.random.default_rng(seed)
    H, I, D = config["hidden_size"], config["intermediate_size"], config["head_dim"]  # noqa: E741
    N, K = config["num_attention_heads"], config["num_key_value_heads"]
    gemma = config["architectures"] == GEMMA3["architectures"]

    def matrix(rows: int, columns: int) -> np.ndarray:
        return (rng.standard_normal((rows, columns)) * columns**-0.5).astype(np.float32)

    def scale(size: int) -> np.ndarray:  # transformers keeps a gemma norm's scale minus one
        return (rng.standard_normal(size) * 0.3 + (0 if gemma else 1)).astype(np.float32)

    embedding = matrix(config["vocab_size"], H) * 2
    tensors = {"model.embed_tokens.weight": embedding, "model.norm.weight": scale(H)}
    if not config.get("tie_word_embeddings", gemma):
        tensors["lm_head.weight"] = matrix(config["vocab_size"], H)
    norms = {"input_layernorm": H, "post_attention_layernorm": H}
    if gemma:
        norms |= {"pre_feedforward_layernorm": H, "post_feedforward_layernorm": H}
        norms |= {"self_attn.q_norm": D, "self_attn.k_norm": D}
    matrices = {
        "self_attn.q_proj": (N * D, H), "self_attn.k_proj": (K * D, H), "self_attn.v_proj": (K * D, H),
        "self_attn.o_proj": (H, N * D),
        "mlp.gate_proj": (I, H), "mlp.up_proj": (I, H), "mlp.down_proj": (H, I),
    }  # fmt: skip
    for i in range(config["num_hidden_layers"]):
        tensors |= {f"model.layers.{i}.{name}.weight": scale(size) for name, size in norms.items()}
        tensors |= {f"model.layers.{i}.{name}.weight": matrix(*shape) for name, shape in matrices.items()}
    return tensors


# Spelled out here once more, not taken from the code under test. Sources: gguf-py's tensor_mapping.py.
GGUF_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip


def gguf_name(name: str, family: str) -> str:
    if name.startswith("rope_"):  # of GGUF alone
        return name
    stem = name.removesuffix(".weight")
    parts = stem.split(".", 3)
    layer, local = (f"blk.{parts[2]}.", parts[3]) if parts[:2] == ["model", "layers"] else ("", stem)
    if local == "post_attention_layernorm":  # means another thing in each of the two
        return layer + ("ffn_norm" if family == "llama" else "post_attention_norm") + ".weight"
    return layer + GGUF_NAMES[local] + ".weight"


def permute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """What llama.cpp's convert_hf_to_gguf.py does to q and k of a llama, for its interleaved RoPE."""
    return (
        weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, *weight.shape[1:])
        .swapaxes(1, 2)
        .reshape(weight.shape)
    )


def gguf_tensors(config: Mapping[str, Any], tensors: Tensors) -> Tensors:
    """The same model as a GGUF file holds it."""
    family = "llama" if config["architectures"] == LLAMA["architectures"] else "gemma3"
    out = {}
    for name, values in tensors.items():
        if family == "llama" and "q_proj" in name:
            values = permute(values, config["num_attention_heads"])
        elif family == "llama" and "k_proj" in name:
            values = permute(values, config["num_key_value_heads"])
        elif family == "gemma3" and "norm" in name:
            values = values + 1
        out[gguf_name(name, family)] = values
    return out


def gguf_metadata(config: Mapping[str, Any]) -> dict[str, Any]:
    """The key-value pairs of the same description."""
    family = "llama" if config["architectures"] == LLAMA["architectures"] else "gemma3"
    pairs = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
        "attention.value_length": config["head_dim"],
        "attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "rope.freq_base": config["rope_theta"],
    }
    if family == "gemma3":
        pairs["attention.sliding_window"] = config["sliding_window"]
    else:
        pairs["rope.dimension_count"] = config["head_dim"]
    return {
        "general.architecture": family,
        **{f"{family}.{key}": value for key, value in pairs.items()},
        "tokenizer.ggml.tokens": [f"<{i}>" for i in range(config["vocab_size"])],
    }


def write_hf(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def write_gguf(path: Path, config: Mapping[str, Any], tensors: Tensors, **more: Any) -> Path:
    """`tensors` are as transformers names them; `more` are further key-value pairs, dots as "__"."""
    pairs = gguf_metadata(config) | {key.replace("__", "."): value for key, value in more.items()}
    writer = gguf.GGUFWriter(path, pairs.pop("general.architecture"))
    for key, value in pairs.items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32,
               str: writer.add_string, list: writer.add_array}[type(value)]  # fmt: skip
        add(key, value)
    for name, values in gguf_tensors(config, tensors).items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
