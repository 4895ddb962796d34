"""RoPE as the files describe it: config.json in its spellings, GGUF keys and tensors of factors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from jaxserve.models import rope_scaling
from jaxserve.models.config import RopeScaling
from jaxserve.models.metadata import Metadata, refuse
from jaxserve.weights.source import TensorSource

KINDS = "default, linear, dynamic, llama3, yarn, longrope"


class Rope(NamedTuple):
    """One way of turning heads."""

    theta: float
    scaling: RopeScaling
    max_position: int  # context length that it is made for


def rope_from_hf(
    meta: Metadata, dim: int, *, theta: float = 10_000.0, nested: dict[str, Any] | None = None
) -> Rope:
    """From config.json: `rope_theta` and `rope_scaling`, or `rope_parameters` with all of it in newer files.

    `theta` is the family's default; `nested` is what stands in place of the last two, where it's known.
    Raises WeightsError that names a method that is not supported or a key that it lacks.
    """
    key = "rope_scaling" if meta.get("rope_scaling", dict, {}) else "rope_parameters"
    scaling = Metadata(meta.get(key, dict, {}) if nested is None else nested)
    theta = scaling.get("rope_theta", float, None) or meta.get("rope_theta", float, theta)
    longest = meta.need("max_position_embeddings", int)
    kind = scaling.get("rope_type", str, None) or scaling.get("type", str, "default")
    if kind == "default":
        return Rope(theta, RopeScaling(), longest)
    if kind in ("longrope", "su"):
        original = meta.get("original_max_position_embeddings", int, None)
        original = original or scaling.get("original_max_position_embeddings", int, None) or longest
        short, long = scaling.need("short_factor", list), scaling.need("long_factor", list)
        magnitude = scaling.get("attention_factor", float, None)
        return Rope(theta, rope_scaling.longrope(short, long, original, longest, magnitude), longest)
    factor = scaling.need("factor", float)
    if kind == "linear":
        return Rope(theta, rope_scaling.linear(dim, factor), math.ceil(longest * factor))
    if kind == "dynamic":
        original = scaling.get("original_max_position_embeddings", int, None) or longest
        return Rope(theta, rope_scaling.dynamic(factor, original), math.ceil(original * factor))
    original = scaling.get("original_max_position_embeddings", int, None)
    if kind == "llama3":
        low, high = scaling.need("low_freq_factor", float), scaling.need("high_freq_factor", float)
        return Rope(theta, rope_scaling.llama3(dim, theta, factor, low, high, original or longest), longest)
    if kind == "yarn":
        made = rope_scaling.yarn(
            dim, theta, factor, original or longest,
            beta_fast=scaling.get("beta_fast", float, 32.0), beta_slow=scaling.get("beta_slow", float, 1.0),
            truncate=scaling.get("truncate", bool, True), attention_factor=_yarn_magnitude(scaling, factor),
        )  # fmt: skip
        return Rope(theta, made, max(longest, math.ceil((original or longest) * factor)))
    refuse(f"{key}.rope_type", kind, KINDS)


def _yarn_magnitude(scaling: Metadata, factor: float) -> float | None:
    """None: the usual one."""
    if (given := scaling.get("attention_factor", float, None)) is not None:
        return given
    weight, all_dim = scaling.get("mscale", float, 0.0), scaling.get("mscale_all_dim", float, 0.0)
    if not weight or not all_dim:
        return None
    return rope_scaling.yarn_magnitude(factor, weight) / rope_scaling.yarn_magnitude(factor, all_dim)


def rope_from_gguf(
    meta: Metadata,
    source: TensorSource,
    architecture: str,
    dim: int,
    *,
    theta: float = 10_000.0,
    truncate: bool = True,
    reads_multiplier: bool = False,
) -> Rope:
    """From the keys `architecture`.rope.* and the tensors rope_freqs, rope_factors_short and _long.

    `theta` and `truncate` (of YaRN's ramp) are the family's, for files that don't say; GGUF has no key for
    the latter. With `reads_multiplier` the family sees to YaRN's yarn_log_multiplier: what it says is a
    part of the attention's scale, and cosines and sines are left as they are. Without, it is refused.
    Source: llama.cpp's llama-context.cpp, for what multiplies what in YaRN.
    """
    at = f"{architecture}.rope."
    theta = meta.get(at + "freq_base", float, theta)
    longest = meta.need(f"{architecture}.context_length", int)
    kind = meta.get(at + "scaling.type", str, "none")
    factor = meta.get(at + "scaling.factor", float, 0.0) or meta.get(at + "scale_linear", float, 0.0) or 1.0
    given = meta.get(at + "scaling.original_context_length", int, 0)
    original = given or longest
    magnitude = meta.get(at + "scaling.attn_factor", float, None)
    read: Callable[[str], list[float]] = lambda name: source.read(name).astype("float64").ravel().tolist()
    if "rope_factors_long.weight" in source.tensors:
        short, long = read("rope_factors_short.weight"), read("rope_factors_long.weight")
        return Rope(theta, rope_scaling.longrope(short, long, original, longest, magnitude), longest)
    if "rope_freqs.weight" in source.tensors:
        return Rope(theta, RopeScaling(tuple(read("rope_freqs.weight"))), longest)
    if kind == "yarn":
        for key in ("yarn_ext_factor", "yarn_attn_factor", *(["attn_factor"] if reads_multiplier else [])):
            if (value := meta.get(f"{at}scaling.{key}", float, 1.0)) != 1:
                refuse(f"{at}scaling.{key}", value, "1, or no such key")
        multiplier = meta.get(at + "scaling.yarn_log_multiplier", float, 0.0)
        if multiplier != 0 and not reads_multiplier:
            refuse(at + "scaling.yarn_log_multiplier", multiplier, "0, or no such key")
        usual = 1.0 if reads_multiplier else rope_scaling.yarn_magnitude(factor)
        made = rope_scaling.yarn(
            dim, theta, factor, original, truncate=truncate, attention_factor=usual * (magnitude or 1.0),
            beta_fast=meta.get(at + "scaling.yarn_beta_fast", float, 32.0),
            beta_slow=meta.get(at + "scaling.yarn_beta_slow", float, 1.0),
        )  # fmt: skip
        return Rope(theta, made, max(longest, math.ceil(original * factor)))
    if kind not in ("none", "linear"):
        refuse(at + "scaling.type", kind, "none, linear, yarn, or longrope with its tensors of factors")
    if factor == 1:
        return Rope(theta, RopeScaling(), longest)
    # As in config.json, the context length is that before scaling, unless the file tells the two apart.
    return Rope(theta, rope_scaling.linear(dim, factor), longest if given else math.ceil(longest * factor))
