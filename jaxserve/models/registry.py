"""The list of model families, and picking one for a file."""

from __future__ import annotations

from typing import cast

from jaxserve.errors import WeightsError
from jaxserve.models import (
    deepseek,
    gemma,
    gemma2,
    gemma3,
    gpt_oss,
    granite,
    llama,
    mistral,
    mixtral,
    olmo2,
    phi3,
    qwen2,
    qwen2_moe,
    qwen3,
    qwen3_moe,
    smollm3,
)  # fmt: skip
from jaxserve.models.family import Family
from jaxserve.weights.source import TensorSource

_MODULES = (
    llama, mistral, mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe, gemma, gemma2, gemma3, phi3, olmo2, granite,
    smollm3, gpt_oss, deepseek,
)  # fmt: skip
FAMILIES = cast(tuple[Family, ...], _MODULES)


def family_for(source: TensorSource) -> Family:
    """The family that a file's architecture belongs to; WeightsError that lists what is supported."""
    if source.format == "gguf":
        found = source.metadata.get("general.architecture")
        by_name = {arch: family for family in FAMILIES for arch in family.gguf_architectures}
        key = "general.architecture"
    else:
        names = source.metadata.get("architectures") or [None]
        found = names[0] if isinstance(names, list) else names
        by_name = {arch: family for family in FAMILIES for arch in family.hf_architectures}
        key = "architectures"
    if not isinstance(found, str) or found not in by_name:
        raise WeightsError(
            f"{key} = {found!r} is not supported; supported: {', '.join(sorted(by_name))}"
        )
    return by_name[found]


def family_named(name: str) -> Family:
    """The family of a ModelConfig."""
    for family in FAMILIES:
        if family.name == name:
            return family
    raise WeightsError(
        f"model family {name!r} is not supported; supported: {', '.join(f.name for f in FAMILIES)}"
    )
