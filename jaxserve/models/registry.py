"""The list of model families, and picking one for a file."""

from __future__ import annotations

from typing import cast

from jaxserve.errors import WeightsError
from jaxserve.models import gemma3, llama
from jaxserve.models.family import Family
from jaxserve.weights.source import TensorSource

FAMILIES = cast(tuple[Family, ...], (llama, gemma3))


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
