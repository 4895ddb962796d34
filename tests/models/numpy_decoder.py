"""Llama and Gemma 3 in float64 NumPy, from the papers, on tensors as transformers names them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tests.models.tiny import GEMMA3, Tensors


def _norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def _turn(x: np.ndarray, theta: float) -> np.ndarray:
    """RoPE of x [T, heads, D] at positions 0 .. T - 1: each pair (i, i + D/2) is a complex number."""
    half = x.shape[-1] // 2
    angles = np.arange(len(x))[:, None] * theta ** (-np.arange(half) / half)
    turned = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None, :]
    return np.concatenate([turned.real, turned.imag], axis=-1)


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


def _gelu_tanh(x: np.ndarray) -> np.ndarray:
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def logits(config: Mapping[str, Any], tensors: Tensors, ids: Sequence[int]) -> np.ndarray:
    """Logits [T, V] after each of `ids`, every one seeing itself and those before it."""
    head = tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])
    return hidden(config, tensors, ids) @ head.astype(np.float64).T


def hidden(config: Mapping[str, Any], tensors: Tensors, ids: Sequence[int]) -> np.ndarray:
    """Normed hidden states [T, H], which logits are made from."""
    w = {name: values.astype(np.float64) for name, values in tensors.items()}
    gemma = config["architectures"] == GEMMA3["architectures"]
    if gemma:  # stored minus one
        w = {name: values + 1 if "norm" in name else values for name, values in w.items()}
    D, N, K = config["head_dim"], config["num_attention_heads"], config["num_key_value_heads"]
    eps, T = config["rms_norm_eps"], len(ids)
    x = w["model.embed_tokens.weight"][list(ids)]
    if gemma:
        x = x * np.sqrt(config["hidden_size"])
    distance = np.arange(T)[:, None] - np.arange(T)

    for i in range(config["num_hidden_layers"]):
        p = lambda name, i=i: w[f"model.layers.{i}.{name}.weight"]
        normed = _norm(x, p("input_layernorm"), eps)
        q = (normed @ p("self_attn.q_proj").T).reshape(T, N, D)
        k = (normed @ p("self_attn.k_proj").T).reshape(T, K, D)
        v = (normed @ p("self_attn.v_proj").T).reshape(T, K, D)
        seen, theta, scale = distance >= 0, config["rope_theta"], D**-0.5
        if gemma:
            q, k = _norm(q, p("self_attn.q_norm"), eps), _norm(k, p("self_attn.k_norm"), eps)
            scale = config["query_pre_attn_scalar"] ** -0.5
            if (i + 1) % config["sliding_window_pattern"]:
                seen, theta = seen & (distance < config["sliding_window"]), config["rope_local_base_freq"]
        q, k = _turn(q, theta), _turn(k, theta)
        heads = []
        for head in range(N):
            scores = np.where(seen, q[:, head] @ k[:, head * K // N].T * scale, -np.inf)
            weights = np.exp(scores - scores.max(1, keepdims=True))
            heads.append(weights / weights.sum(1, keepdims=True) @ v[:, head * K // N])
        mixed = np.concatenate(heads, axis=1) @ p("self_attn.o_proj").T
        if gemma:
            mixed = _norm(mixed, p("post_attention_layernorm"), eps)
        x = x + mixed
        normed = _norm(x, p("pre_feedforward_layernorm" if gemma else "post_attention_layernorm"), eps)
        act = _gelu_tanh if gemma else _silu
        mixed = act(normed @ p("mlp.gate_proj").T) * (normed @ p("mlp.up_proj").T) @ p("mlp.down_proj").T
        if gemma:
            mixed = _norm(mixed, p("post_feedforward_layernorm"), eps)
        x = x + mixed
    return _norm(x, w["model.norm.weight"], eps)
