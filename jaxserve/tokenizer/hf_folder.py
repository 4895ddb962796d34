"""A tokenizer from a Hugging Face folder, or from a converted checkpoint, which is laid out like one."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxserve.errors import TokenizerError
from jaxserve.tokenizer.boundaries import make_boundaries
from jaxserve.tokenizer.bpe import BpeTokenizer, adds_itself, read_tokenizer_json
from jaxserve.tokenizer.hf_special import (
    CONFIG,
    MAP,
    SpecialTokens,
    added_tokens,
    special_tokens,
    with_special,
)
from jaxserve.tokenizer.sentencepiece import SentencePieceTokenizer, add_tokens, mark_control, read_model
from jaxserve.tokenizer.table import Boundaries, TableTokenizer

EXACT = "boundaries"  # our own key in CONFIG: all ids, so that nothing is guessed again


def tokenizer_from_folder(path: Path) -> TableTokenizer:
    """tokenizer.json if there is one, else tokenizer.model. Raises TokenizerError."""
    config = read_json(path / CONFIG)
    if config.get("add_eos_token"):
        raise TokenizerError(
            f"{path / CONFIG}: add_eos_token is true, but a prompt that ends with EOS can't be continued; "
            f"set it to false"
        )
    special = special_tokens(path, config, read_json(path / MAP))
    if (path / "tokenizer.json").exists():
        return _from_json(path, config, special)
    if (path / "tokenizer.model").exists():
        return _from_model(path, config, special)
    raise TokenizerError(f"{path} has neither tokenizer.json nor tokenizer.model")


def write_folder(tokenizer: TableTokenizer, path: Path) -> None:
    """What `tokenizer_from_folder` reads back identically."""
    own = tokenizer.write(path)
    ends = tokenizer.boundaries
    config = {
        **own,
        "bos_token": None if ends.bos_id is None else tokenizer.token_text(ends.bos_id),
        "eos_token": None if ends.eos_id is None else tokenizer.token_text(ends.eos_id),
        "add_bos_token": ends.add_bos,
        "add_eos_token": False,
        EXACT: {"bos_id": ends.bos_id, "eos_id": ends.eos_id, "eos_ids": sorted(ends.eos_ids)},
    }
    (path / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def read_json(path: Path) -> dict[str, Any]:
    """The object in this file; empty if there is no file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise TokenizerError(f"can't read {path}: {error.strerror}") from error
    except ValueError as error:
        raise TokenizerError(f"{path} is no valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise TokenizerError(f"{path} holds a {type(value).__name__}; expected an object")
    return value


def _from_json(path: Path, config: Mapping[str, Any], named: SpecialTokens) -> TableTokenizer:
    tokenizer = read_tokenizer_json(path / "tokenizer.json")
    if EXACT not in config:
        tokenizer = with_special(tokenizer, added_tokens(path, config), named.texts, path)
    before, after = adds_itself(tokenizer)
    if after and EXACT not in config and config.get("add_eos_token") is None:
        texts = [tokenizer.id_to_token(i) for i in after]
        raise TokenizerError(
            f"{path / 'tokenizer.json'}: its post-processor ends every text with {texts}; a prompt that "
            f"ends so can't be continued"
        )

    def boundaries(ids_by_text: Mapping[str, int], special: frozenset[int]) -> Boundaries:
        return _boundaries(path, config, named, ids_by_text, special, before[:1])

    return BpeTokenizer(tokenizer, boundaries)


def _from_model(path: Path, config: Mapping[str, Any], named: SpecialTokens) -> TableTokenizer:
    model = read_model(path / "tokenizer.model")
    added = added_tokens(path, config, read_json(path / "added_tokens.json"))
    add_tokens(model, {i: (token["content"], token["special"]) for i, token in added.items()})
    if EXACT not in config:
        mark_control(model, named.texts)
    if isinstance(config.get("add_prefix_space"), bool):
        model.normalizer_spec.add_dummy_prefix = config["add_prefix_space"]
    texts = [piece.piece for piece in model.pieces]
    spec = model.trainer_spec
    defaults = [texts.index(spec.bos_piece)] if spec.bos_piece in texts else []
    if not named.says_eos and spec.eos_piece in texts:
        named = replace(named, eos=(spec.eos_piece,))

    def boundaries(ids_by_text: Mapping[str, int], special: frozenset[int]) -> Boundaries:
        return _boundaries(path, config, named, ids_by_text, special, defaults)

    return SentencePieceTokenizer(
        model, boundaries, prefix_after_special=config.get("legacy", True) is not False
    )


def _boundaries(
    path: Path,
    config: Mapping[str, Any],
    named: SpecialTokens,
    ids_by_text: Mapping[str, int],
    special: frozenset[int],
    bos_added: list[int],  # the id that the vocabulary's own file puts first, if any
) -> Boundaries:
    """From our own exact record, or from all that Hugging Face's files say."""
    if (exact := config.get(EXACT)) is not None:
        try:
            return Boundaries(
                bos_id=exact["bos_id"],
                eos_id=exact["eos_id"],
                eos_ids=frozenset(exact["eos_ids"]),
                add_bos=config["add_bos_token"],
            )
        except (KeyError, TypeError) as error:
            raise TokenizerError(f"{path / CONFIG}: {EXACT!r} is incomplete: {error}") from error
    model_configs = [read_json(path / name) for name in ("generation_config.json", "config.json")]
    bos_id = None if named.bos is None else _token_id(path, "bos_token", named.bos, ids_by_text)
    if not named.says_bos:
        bos_id = next(iter(bos_added or _ids(path, model_configs, "bos_token_id")), None)
    eos_ids = [_token_id(path, "eos_token", text, ids_by_text) for text in named.eos]
    eos_ids += _ids(path, model_configs, "eos_token_id")
    add_bos = config.get("add_bos_token")
    return make_boundaries(
        ids_by_text,
        special,
        vocab_size=1 + max(ids_by_text.values(), default=-1),
        bos_id=bos_id,
        eos_ids=list(dict.fromkeys(eos_ids)),
        add_bos=(bos_id is not None and bos_added == [bos_id]) if add_bos is None else bool(add_bos),
    )


def _token_id(path: Path, key: str, text: str, ids_by_text: Mapping[str, int]) -> int:
    if text not in ids_by_text:
        raise TokenizerError(f"{path}: {key} {text!r} is not in the vocabulary")
    return ids_by_text[text]


def _ids(path: Path, configs: list[dict[str, Any]], key: str) -> list[int]:
    """Ids under this key, one or a list, in the order of the files; multimodal models nest them."""
    found: list[int] = []
    for config in configs:
        text_config = config.get("text_config")
        value = config.get(key, text_config.get(key) if isinstance(text_config, dict) else None)
        values = value if isinstance(value, list) else [] if value is None else [value]
        for token_id in values:
            if not isinstance(token_id, int) or isinstance(token_id, bool):
                raise TokenizerError(f"{path}: {key} is {value!r}; expected an id or a list of ids")
        found += values
    return found
