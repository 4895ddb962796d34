"""Special and added tokens as Hugging Face's files name them, old forms and new.

A special token is a text, or an object with the text as its `content`. Newer folders have them all in
tokenizer_config.json; what that leaves out, older ones have in special_tokens_map.json.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from jaxserve.errors import TokenizerError

CONFIG = "tokenizer_config.json"
MAP = "special_tokens_map.json"
_MORE = ("additional_special_tokens", "extra_special_tokens")  # the older and the newer name


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """Texts of the tokens that these files call special. `eos` may be several, the main one first."""

    bos: str | None
    eos: tuple[str, ...]
    more: tuple[str, ...]
    says_bos: bool  # one of the files has the key, were it to say that there is none
    says_eos: bool

    @property
    def texts(self) -> tuple[str, ...]:
        return (*(() if self.bos is None else (self.bos,)), *self.eos, *self.more)


def special_tokens(path: Path, config: Mapping[str, Any], older: Mapping[str, Any]) -> SpecialTokens:
    """From tokenizer_config.json (`config`) and special_tokens_map.json (`older`) in the folder `path`."""

    def texts(key: str) -> list[str]:
        file, values = (CONFIG, config) if key in config or key not in older else (MAP, older)
        value = values.get(key)
        if isinstance(value, dict) and key == "extra_special_tokens":
            value = list(value.values())
        listed = value if isinstance(value, list) else [] if value is None else [value]
        return [_text(token, f"{path / file}: {key}") for token in listed]

    bos, eos = texts("bos_token"), texts("eos_token")
    if len(bos) > 1:
        raise TokenizerError(f"{path / CONFIG}: bos_token is {bos}; expected one token")
    return SpecialTokens(
        bos=bos[0] if bos else None,
        eos=tuple(eos),
        more=tuple(text for key in _MORE for text in texts(key)),
        says_bos="bos_token" in config or "bos_token" in older,
        says_eos="eos_token" in config or "eos_token" in older,
    )


def added_tokens(
    path: Path, config: Mapping[str, Any], older: Mapping[str, Any] | None = None
) -> dict[int, dict[str, Any]]:
    """Id -> object with `content` and `special`: `added_tokens_decoder`, over added_tokens.json (`older`)."""
    added = {i: {"content": text, "special": True} for text, i in (older or {}).items()}
    try:
        for token_id, token in config.get("added_tokens_decoder", {}).items():
            special = bool(token.get("special", False))
            added[int(token_id)] = {**token, "content": str(token["content"]), "special": special}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise TokenizerError(f"{path / CONFIG}: added_tokens_decoder is malformed: {error!r}") from error
    return added


def with_special(
    tokenizer: Tokenizer, added: Mapping[int, Mapping[str, Any]], special: Iterable[str], path: Path
) -> Tokenizer:
    """`tokenizer`, read from tokenizer.json, with the `added` tokens too, and those of `special` marked.

    It is the same object where nothing is missing, as in nearly every folder.
    """
    vocabulary = tokenizer.get_vocab(with_added_tokens=True)
    texts = {i: text for text, i in vocabulary.items()}
    known = {i: token.special for i, token in tokenizer.get_added_tokens_decoder().items()}
    wanted: dict[int, dict[str, Any]] = {}
    for i, token in sorted(added.items()):
        if texts.get(i, token["content"]) != token["content"]:
            raise TokenizerError(
                f"{path / CONFIG}: added_tokens_decoder says that id {i} is {token['content']!r}, in "
                f"tokenizer.json it is {texts[i]!r}: correct the one that is wrong"
            )
        if i not in known or (token["special"] and not known[i]):
            wanted[i] = {**token}
    for text in special:
        if (token_id := vocabulary.get(text)) is not None and not known.get(token_id, False):
            wanted[token_id] = {**wanted.get(token_id, {}), "content": text, "special": True}
    if not wanted:
        return tokenizer
    # The package can't change a token that it has, so the file is changed and read again.
    data = json.loads(tokenizer.to_str())
    entries = {entry["id"]: entry for entry in data["added_tokens"]}
    for i, token in wanted.items():
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
        entries[i] = {**plain, **token, **entries.get(i, {}), "id": i, "special": token["special"]}
        entries[i].pop("__type", None)
    data["added_tokens"] = [entries[i] for i in sorted(entries)]
    try:
        made = Tokenizer.from_str(json.dumps(data))
    except Exception as error:  # the package raises nothing narrower
        raise TokenizerError(f"{path / CONFIG}: its added tokens are malformed: {error}") from error
    for i, token in wanted.items():
        if (found := made.token_to_id(token["content"])) != i:
            raise TokenizerError(
                f"{path / CONFIG}: added_tokens_decoder gives {token['content']!r} the id {i}, but with "
                f"tokenizer.json it gets {found}: ids must be without a gap, and each text have one"
            )
    return made


def _text(token: Any, where: str) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise TokenizerError(f"{where} is {token!r:.80}; expected a text, or an object with 'content'")
    return text
