"""Tiny model files written for tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Q

TinyTensors = Mapping[str, tuple[np.ndarray, Q]]
HIDDEN, MLP, HEADS, KV_HEADS, LAYERS = 64, 96, 4, 2, 2


def write_gguf(path: Path, tensors: TinyTensors, pairs: Mapping[str, Any] | None = None) -> Path:
    """A GGUF file by the gguf package's writer. `pairs` are strings, bools, ints, floats and lists."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in (pairs or {}).items():
        match value:
            case bool():
                writer.add_bool(key, value)
            case str():
                writer.add_string(key, value)
            case int():
                writer.add_uint32(key, value)
            case float():
                writer.add_float32(key, value)
            case list():
                writer.add_array(key, value)
    for name, (values, qtype) in tensors.items():
        if qtype in (Q.F32, Q.F16):
            writer.add_tensor(name, values.astype(np.float32 if qtype == Q.F32 else np.float16))
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def byte_level_vocabulary() -> list[str]:
    """GPT-2's spelling of the 256 bytes, then a few merges and special tokens."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spelling = {byte: chr(byte) for byte in plain}
    for n, byte in enumerate(byte for byte in range(256) if byte not in spelling):
        spelling[byte] = chr(256 + n)
    return [spelling[byte] for byte in range(256)] + ["he", "ll", "hell", "hello", "<|start|>", "<|end|>"]


def tiny_llama_pairs() -> dict[str, Any]:
    tokens = byte_level_vocabulary()
    return {
        "llama.context_length": 128,
        "llama.embedding_length": HIDDEN,
        "llama.block_count": LAYERS,
        "llama.feed_forward_length": MLP,
        "llama.attention.head_count": HEADS,
        "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": 10000.0,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 2) + [3, 3],
        "tokenizer.ggml.merges": ["h e", "l l", "he ll", "hell o"],
        "tokenizer.ggml.bos_token_id": len(tokens) - 2,
        "tokenizer.ggml.eos_token_id": len(tokens) - 1,
        "tokenizer.chat_template": "{% for m in messages %}{{ m['content'] }}{% endfor %}",
    }


def tiny_llama_tensors(seed: int = 0) -> dict[str, tuple[np.ndarray, Q]]:
    rng = np.random.default_rng(seed)
    kv = HIDDEN // HEADS * KV_HEADS

    def w(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    tensors = {
        "token_embd.weight": (w(len(byte_level_vocabulary()), HIDDEN), Q.Q8_0),
        "output_norm.weight": (w(HIDDEN), Q.F32),
    }
    for i in range(LAYERS):
        tensors |= {
            f"blk.{i}.attn_norm.weight": (w(HIDDEN), Q.F32),
            f"blk.{i}.attn_q.weight": (w(HIDDEN, HIDDEN), Q.Q4_1),
            f"blk.{i}.attn_k.weight": (w(kv, HIDDEN), Q.Q4_0),
            f"blk.{i}.attn_v.weight": (w(kv, HIDDEN), Q.F16),
            f"blk.{i}.attn_output.weight": (w(HIDDEN, HIDDEN), Q.BF16),
            f"blk.{i}.ffn_norm.weight": (w(HIDDEN), Q.F32),
            f"blk.{i}.ffn_gate.weight": (w(MLP, HIDDEN), Q.Q5_0),
            f"blk.{i}.ffn_up.weight": (w(MLP, HIDDEN), Q.Q5_1),
            f"blk.{i}.ffn_down.weight": (w(HIDDEN, MLP), Q.Q8_0),
        }
    return tensors


@pytest.fixture(scope="session")
def make_gguf() -> Callable[..., Path]:
    """`write_gguf`."""
    return write_gguf


@pytest.fixture(scope="session")
def tiny_pairs() -> dict[str, Any]:
    return tiny_llama_pairs()


@pytest.fixture(scope="session")
def tiny_tensors() -> dict[str, tuple[np.ndarray, Q]]:
    return tiny_llama_tensors()


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole llama of two layers, of mixed quantisation, with a byte-level tokenizer."""
    path = tmp_path_factory.mktemp("tiny") / "tiny-llama.gguf"
    return write_gguf(path, tiny_llama_tensors(), tiny_llama_pairs())
