"""How a model's authors want it sampled: generation_config.json, and the same in a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError
from jaxserve.tokenizer.hf_folder import read_json

FILE = "generation_config.json"

# The keys that are honoured, and the range of each: that of the request field which it stands for.
RANGES: dict[str, tuple[float, float]] = {
    "temperature": (0, 2),
    "top_p": (0, 1),
    "top_k": (-1, 2**31 - 1),
    "min_p": (0, 1),
    "repetition_penalty": (0.01, 100),
    "max_new_tokens": (1, 2**31 - 1),
}
_WHOLE = ("top_k", "max_new_tokens")
_GGUF_KEYS = {
    "temperature": "general.sampling.temp",
    "top_p": "general.sampling.top_p",
    "top_k": "general.sampling.top_k",
    "min_p": "general.sampling.min_p",
    "repetition_penalty": "general.sampling.penalty_repeat",
}


@dataclass(frozen=True, slots=True)
class GenerationDefaults:
    """What stands for the fields that a request leaves out, checked; without a value it is the server's own.

    `sampling` is by request field. `max_tokens` is of a chat: a completion has OpenAI's 16.
    """

    sampling: Mapping[str, float] = field(default_factory=dict)
    max_tokens: int | None = None
    source: str = FILE  # what says so

    def __bool__(self) -> bool:
        return bool(self.sampling) or self.max_tokens is not None

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:.10g}" for name, value in self.shown().items())

    def shown(self) -> dict[str, float]:
        """All of them by request field."""
        return {**self.sampling, **({} if self.max_tokens is None else {"max_tokens": self.max_tokens})}


@dataclass(frozen=True, slots=True)
class GenerationConfig:
    """What a model's file says of sampling, by the keys of generation_config.json. Not checked yet."""

    source: str
    values: Mapping[str, Any]
    spelled: Mapping[str, str] = field(default_factory=dict)  # how the file spells a key, where it differs

    def defaults(self) -> GenerationDefaults:
        """Raises ConfigError that names file and key for a value that no request could have."""
        known = {key: self._number(key) for key in RANGES if self.values.get(key) is not None}
        draws = self.values.get("do_sample")
        if draws is not None and not isinstance(draws, bool):
            raise self._wrong("do_sample", "true or false")
        if draws is False:
            known["temperature"] = 0.0  # the likeliest token
        most = known.pop("max_new_tokens", None)
        return GenerationDefaults(known, None if most is None else int(most), self.source)

    def _number(self, key: str) -> float:
        value, (lowest, highest) = self.values[key], RANGES[key]
        whole = key in _WHOLE
        what = f"{'a whole number' if whole else 'a number'} from {lowest:.10g} to {highest:.10g}"
        if isinstance(value, bool) or not isinstance(value, int | float) or not lowest <= value <= highest:
            raise self._wrong(key, what)
        if whole and value != int(value):
            raise self._wrong(key, what)
        return int(value) if whole else value

    def _wrong(self, key: str, expected: str) -> ConfigError:
        return ConfigError(
            f"{self.source}: {self.spelled.get(key, key)} is {self.values[key]!r:.80}; expected {expected}. "
            "Correct it, or start with --generation-config none"
        )


def generation_from_gguf(metadata: Mapping[str, Any], source: str) -> GenerationConfig:
    """From the pairs that llama.cpp's converter makes of generation_config.json; `source` is the file."""
    values = {key: metadata[name] for key, name in _GGUF_KEYS.items() if name in metadata}
    # They are float32: 0.6 is read as 0.6000000238418579.
    values = {key: float(f"{v:.7g}") if isinstance(v, float) else v for key, v in values.items()}
    return GenerationConfig(source, values, _GGUF_KEYS)


def generation_from_folder(path: Path) -> GenerationConfig:
    """From a folder's generation_config.json. Raises TokenizerError for one that is no JSON object."""
    values = read_json(path / FILE)
    return GenerationConfig(
        str(path / FILE), {key: values[key] for key in (*RANGES, "do_sample") if key in values}
    )


def write_generation(config: GenerationConfig, path: Path) -> None:
    """Write into an existing folder what `generation_from_folder` reads back; nothing if it says nothing."""
    if config.values:
        (path / FILE).write_text(json.dumps(dict(config.values), indent=2) + "\n", encoding="utf-8")
