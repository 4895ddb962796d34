"""Weights of a tiny model, made from the names and shapes of its tensors alone. NumPy only.

The same bits on every machine: whole numbers drawn by NumPy's frozen legacy generator, times a power of two.
Every value is exact in float16 and in bfloat16 too, so a file of either has the same answers. Magnitudes are
such that attention is spread, top-k choices of routers have no near ties, and a norm, bias or sink that is
left out changes the answer (scripts/record_families.py checks that for each kind of tensor).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Tensors = dict[str, np.ndarray]
SPREAD = 255 / 12**0.5  # standard deviation of a draw


def _draws(name: str, shape: Sequence[int]) -> np.ndarray:
    """Whole numbers from -127 to 127, seeded by the name."""
    rng = np.random.RandomState(zlib.crc32(name.encode()))
    return np.floor(rng.random_sample(tuple(shape)) * 255).astype(np.int64) - 127


def tensor(name: str, shape: Sequence[int], model_type: str) -> np.ndarray:
    """One tensor as a file holds it: float32, or uint8 for the blocks and scales of MXFP4."""
    draws = _draws(name, shape)
    if name.endswith("_blocks"):
        return (draws + 128).astype(np.uint8)
    if name.endswith("_scales"):  # exponents of two, plus 127
        return (draws % 3 + 121).astype(np.uint8)
    if "norm" in name:
        around = 0.0 if model_type.startswith("gemma") else 1.0  # gemma's files hold the scale minus one
        return (draws // 2 * 2.0**-7 + around).astype(np.float32)
    if name.endswith("sinks"):
        return (draws * 2.0**-6).astype(np.float32)
    if name.endswith("e_score_correction_bias"):
        return (draws * 2.0**-9).astype(np.float32)
    if name.endswith("bias"):
        return (draws * 2.0**-8).astype(np.float32)
    if "embed_tokens" in name:  # where they are multiplied, larger ones would outweigh all layers
        multiplied = model_type.startswith(("gemma", "granite"))
        return (draws * (2.0**-10 if multiplied else 2.0**-8)).astype(np.float32)
    if len(shape) < 2:
        raise ValueError(f"tensor {name} of shape {list(shape)} is of no known kind")
    fan_in, gain = shape[-1], 1.5
    if name.endswith(("experts.gate_up_proj", "experts.down_proj")):  # [experts, in, out], of gpt-oss
        fan_in, gain = shape[1], (3.0 if "gate_up" in name else 1.5)  # 3: some pass its limit of 7
    if name.endswith((".gate.weight", ".router.weight")):
        gain = 3.0
    step = round(math.log2(gain / fan_in**0.5 / SPREAD))
    return (draws * 2.0**step).astype(np.float32)


def tensors(config: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> Tensors:
    """All tensors of a model of this config."""
    return {name: tensor(name, shape, config["model_type"]) for name, shape in shapes.items()}


def checksum(made: Mapping[str, np.ndarray]) -> int:
    """Tells weights that differ from a model that is wrong."""
    return zlib.crc32(b"".join(name.encode() + made[name].tobytes() for name in sorted(made)))
