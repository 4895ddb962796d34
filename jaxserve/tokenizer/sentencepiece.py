"""SentencePiece over the `sentencepiece` package, whatever file the pieces come from."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from google.protobuf.message import DecodeError
from sentencepiece import sentencepiece_model_pb2

from jaxserve.errors import TokenizerError
from jaxserve.tokenizer.special import SpecialSplitter
from jaxserve.tokenizer.table import Boundaries, TableTokenizer

pb: Any = sentencepiece_model_pb2  # generated, without types
Model = Any  # pb.ModelProto

SPACE = "\u2581"  # how pieces spell a space
_Piece = pb.ModelProto.SentencePiece
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = (
    _Piece.NORMAL, _Piece.UNKNOWN, _Piece.CONTROL, _Piece.USER_DEFINED, _Piece.UNUSED, _Piece.BYTE,
)  # fmt: skip
KINDS = frozenset((NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE))  # GGUF numbers them alike


class SentencePieceTokenizer(TableTokenizer):
    """Control and unknown pieces are special. User-defined pieces are text that is never split.

    `prefix_after_special`: where the model puts a space before a text, it also puts one before text that
    follows a special token (llama.cpp, and Hugging Face's "legacy" behaviour).
    """

    def __init__(
        self,
        model: Model,
        boundaries_of: Callable[[Mapping[str, int], frozenset[int]], Boundaries],
        *,
        prefix_after_special: bool = True,
    ):
        _check(model)
        self._model = model.SerializeToString()
        texts = [piece.piece for piece in model.pieces]
        types = [piece.type for piece in model.pieces]
        special = frozenset(i for i, kind in enumerate(types) if kind in (CONTROL, UNKNOWN))
        ids_by_text = {text: i for i, text in enumerate(texts)}
        super().__init__(
            texts,
            [_piece_bytes(text, kind) for text, kind in zip(texts, types)],
            special,
            boundaries_of(ids_by_text, special),
        )
        self._specials = SpecialSplitter({texts[i]: i for i in special})
        self._prefix_after_special = prefix_after_special
        self._first = _processor(self._model)
        self._after_special = self._first
        if model.normalizer_spec.add_dummy_prefix and not prefix_after_special:
            bare = pb.ModelProto()
            bare.CopyFrom(model)
            bare.normalizer_spec.add_dummy_prefix = False
            self._after_special = _processor(bare.SerializeToString())

    def _encode(self, text: str, parse_special: bool) -> list[int]:
        if not parse_special:
            return self._first.encode(text)
        ids: list[int] = []
        processor = self._first
        for piece in self._specials.split(text):
            if isinstance(piece, int):
                ids.append(piece)
                processor = self._after_special
            else:
                ids += processor.encode(piece)
        return ids

    def write(self, folder: Path) -> Mapping[str, Any]:
        (folder / "tokenizer.model").write_bytes(self._model)
        return {"tokenizer_class": "LlamaTokenizer", "legacy": self._prefix_after_special}


def model_from_pieces(
    tokens: Sequence[str],
    scores: Sequence[float],
    types: Sequence[int],
    *,
    unknown_id: int | None,
    add_dummy_prefix: bool,
) -> Model:
    """A BPE model of these pieces, in this order, that changes no character of its input.

    `types` are piece kinds as GGUF and SentencePiece number them. Raises TokenizerError.
    """
    model = pb.ModelProto()
    has_bytes = False
    for i, (text, score, kind) in enumerate(zip(tokens, scores, types)):
        if kind not in KINDS:
            raise TokenizerError(f"token {i} ({text!r}) has type {kind}; known are {sorted(KINDS)}")
        if kind == USER_DEFINED:
            text = text.replace(" ", SPACE)  # GGUF has them as plain text, the model matches escaped text
        model.pieces.add(piece=text, score=score, type=kind)
        has_bytes = has_bytes or kind == BYTE
    if unknown_id is None and "<unk>" in tokens:
        unknown_id = list(tokens).index("<unk>")
    if UNKNOWN not in types:
        if unknown_id is None:
            raise TokenizerError("no token is of type unknown, and no unknown token id is given")
        model.pieces[unknown_id].type = UNKNOWN
    model.trainer_spec.model_type = pb.TrainerSpec.BPE
    model.trainer_spec.byte_fallback = has_bytes
    model.trainer_spec.vocab_size = len(tokens)
    model.normalizer_spec.name = "identity"
    model.normalizer_spec.add_dummy_prefix = add_dummy_prefix
    model.normalizer_spec.remove_extra_whitespaces = False
    model.normalizer_spec.escape_whitespaces = True
    return model


def read_model(path: Path) -> Model:
    """The contents of a `tokenizer.model`. Raises TokenizerError if it is none."""
    model = pb.ModelProto()
    try:
        model.ParseFromString(path.read_bytes())
    except DecodeError as error:
        raise TokenizerError(f"{path} is no SentencePiece model, or a truncated one: {error}") from error
    except OSError as error:
        raise TokenizerError(f"can't read {path}: {error.strerror}") from error
    if not model.pieces:
        raise TokenizerError(f"{path} holds no pieces: it is empty or no SentencePiece model")
    return model


def add_tokens(model: Model, added: Mapping[int, tuple[str, bool]]) -> None:
    """Apply a Hugging Face list of added tokens, id -> (text, special), to the model's own pieces.

    An id of the model gets that text and kind; an id past its end becomes a new piece.
    """
    for token_id, (text, special) in sorted(added.items()):
        if token_id > len(model.pieces):
            raise TokenizerError(
                f"added token {text!r} has id {token_id}, but the ids before it end at "
                f"{len(model.pieces) - 1}: ids must be without a gap"
            )
        if token_id == len(model.pieces):
            model.pieces.add(piece=text, score=0.0, type=USER_DEFINED)
        piece = model.pieces[token_id]
        if piece.type == UNKNOWN and piece.piece == text:
            continue
        piece.piece = text if special else text.replace(" ", SPACE)
        piece.type = CONTROL if special else USER_DEFINED


def mark_control(model: Model, texts: Collection[str]) -> None:
    """Make control tokens of the pieces that are these texts."""
    for piece in model.pieces:
        if piece.piece in texts and piece.type in (NORMAL, USER_DEFINED):
            piece.type = CONTROL


def _check(model: Model) -> None:
    if model.trainer_spec.treat_whitespace_as_suffix:
        raise TokenizerError("SentencePiece models with treat_whitespace_as_suffix are not supported")
    if model.denormalizer_spec.precompiled_charsmap:
        raise TokenizerError("SentencePiece models with a denormalizer are not supported")


def _piece_bytes(text: str, kind: int) -> bytes:
    if kind == BYTE:
        try:
            return bytes([int(text[3:-1], 16)])  # "<0xE4>"
        except ValueError as error:
            raise TokenizerError(f"byte token {text!r} is not of the form <0xE4>") from error
    if kind in (CONTROL, UNKNOWN):
        return text.encode()
    return text.replace(SPACE, " ").encode()


def _processor(model: bytes) -> Any:
    try:
        return sentencepiece.SentencePieceProcessor(model_proto=model)
    except RuntimeError as error:
        raise TokenizerError(f"SentencePiece refuses the model: {error}") from error
