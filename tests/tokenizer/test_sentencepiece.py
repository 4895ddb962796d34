"""SentencePiece models of our own training, against the `sentencepiece` package."""

from __future__ import annotations

import io
import json

import pytest
import sentencepiece
from hypothesis import given
from hypothesis import strategies as st
from sentencepiece import sentencepiece_model_pb2 as pb

from jaxserve.errors import TokenizerError
from jaxserve.tokenizer import load

CORPUS = ["the cat sat on the mat", "naïve café 你好", "don't 123 4567", "a  b   c", "code() { }"] * 20
TEXT = st.text(st.sampled_from("the cat sńé你👩12' \n\t<>s/") | st.characters(exclude_categories=("Cs",)))


def train(**options) -> bytes:
    out = io.BytesIO()
    defaults = {
        "vocab_size": 340,
        "model_type": "bpe",
        "byte_fallback": True,
        "character_coverage": 1.0,
        "hard_vocab_limit": False,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "user_defined_symbols": ["<tool>", "\n", "▁▁"],
        "control_symbols": ["<turn>", "<|im_end|>"],
        "minloglevel": 2,
    }
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=out, **defaults | options
    )
    return out.getvalue()


@pytest.fixture(scope="module")
def model() -> bytes:
    return train()


def folder_of(tmp_path, model: bytes, **config):
    (tmp_path / "tokenizer.model").write_bytes(model)
    if config:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def gguf_of(model: bytes, **changes):
    """GGUF metadata of a SentencePiece model, as the converters write it."""
    proto = pb.ModelProto.FromString(model)
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [
            p.piece.replace("▁", " ") if p.type == p.USER_DEFINED else p.piece for p in proto.pieces
        ],
        "tokenizer.ggml.scores": [p.score for p in proto.pieces],
        "tokenizer.ggml.token_type": [p.type for p in proto.pieces],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    for key, value in changes.items():
        metadata[f"tokenizer.ggml.{key}"] = value
    return {key: value for key, value in metadata.items() if value is not None}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"add_dummy_prefix": False},
        {"byte_fallback": False},
        {"model_type": "unigram", "vocab_size": 320},
        {"normalization_rule_name": "nmt_nfkc", "remove_extra_whitespaces": True},
    ],
    ids=str,
)
def test_tokenizer_model_encodes_and_decodes_as_the_package_does(options, tmp_path):
    model = train(**options)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    ours = load.from_folder(folder_of(tmp_path, model))
    dummy = options.get("add_dummy_prefix", True)

    @given(TEXT)
    def check(text):
        ids = theirs.encode(text)
        assert ours.encode(text, parse_special=False) == ids
        if theirs.unk_id() not in ids:
            # The package drops the space that was put before the text; we keep a first token's space.
            assert ours.decode(ids) == (" " if dummy and ids else "") + theirs.decode(ids)

    check()


@pytest.mark.parametrize("dummy", [True, False])
def test_gguf_metadata_gives_the_same_ids_as_the_model_it_was_made_from(dummy):
    model = train(add_dummy_prefix=dummy)
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    ours = load.from_gguf(gguf_of(model, add_space_prefix=dummy))

    @given(TEXT)
    def check(text):
        assert ours.encode(text, parse_special=False) == theirs.encode(text)

    check()


def test_a_gguf_file_that_does_not_say_puts_a_space_before_a_text_and_wants_bos(model):
    tokenizer = load.from_gguf(gguf_of(model))
    assert tokenizer.decode(tokenizer.encode("the cat")) == " the cat"
    assert tokenizer.add_bos
    assert not load.from_gguf(gguf_of(model, add_bos_token=False)).add_bos


def test_pieces_of_every_kind_have_the_right_bytes(model, tmp_path):
    tokenizer = load.from_folder(folder_of(tmp_path, model))
    ids = {tokenizer.token_text(i): i for i in range(tokenizer.vocab_size)}
    assert tokenizer.token_bytes(ids["<0xE4>"]) == b"\xe4"
    assert tokenizer.token_bytes(ids["▁the"]) == b" the"
    assert tokenizer.token_bytes(ids["▁▁"]) == b"  "
    assert tokenizer.token_bytes(ids["<turn>"]) == b"<turn>"
    special = {text for text, i in ids.items() if tokenizer.is_special(i)}
    assert special == {"<unk>", "<s>", "</s>", "<turn>", "<|im_end|>"}


def test_control_tokens_are_parsed_only_on_request_and_user_defined_ones_always(model, tmp_path):
    tokenizer = load.from_folder(folder_of(tmp_path, model))
    ids = {tokenizer.token_text(i): i for i in range(tokenizer.vocab_size)}
    parsed = tokenizer.encode("the<turn><tool>cat")
    assert ids["<turn>"] in parsed
    assert ids["<tool>"] in parsed
    plain = tokenizer.encode("the<turn><tool>cat", parse_special=False)
    assert ids["<turn>"] not in plain
    assert ids["<tool>"] in plain
    assert tokenizer.decode(plain) == " the<turn><tool>cat"


@pytest.mark.parametrize(("legacy", "text"), [(True, " the<turn> cat"), (False, " the<turn>cat")])
def test_the_space_before_text_after_a_special_token_follows_the_legacy_flag(legacy, text, model, tmp_path):
    tokenizer = load.from_folder(folder_of(tmp_path, model, legacy=legacy))
    assert tokenizer.decode(tokenizer.encode("the<turn>cat"), skip_special=False) == text
    (target := tmp_path / "again").mkdir()
    load.save(tokenizer, target)
    again = load.from_folder(target)
    assert again.decode(again.encode("the<turn>cat"), skip_special=False) == text


def test_without_legacy_a_text_that_begins_with_a_special_token_gets_no_space(model, tmp_path):
    tokenizer = load.from_folder(folder_of(tmp_path, model, legacy=False))
    assert tokenizer.decode(tokenizer.encode("<turn>cat"), skip_special=False) == "<turn>cat"


def test_added_tokens_rename_pieces_and_extend_the_vocabulary(model, tmp_path):
    size = len(pb.ModelProto.FromString(model).pieces)
    turn = [p.piece for p in pb.ModelProto.FromString(model).pieces].index("<tool>")
    added = {
        str(turn): {"content": "<call>", "special": True},
        str(size): {"content": "<new one>", "special": True},
        str(size + 1): {"content": "<plain one>", "special": False},
    }
    folder = folder_of(tmp_path, model, added_tokens_decoder=added, eos_token={"content": "<new one>"})
    tokenizer = load.from_folder(folder)
    assert tokenizer.vocab_size == size + 2
    assert tokenizer.encode("<call><new one>") == [turn, size]
    assert size + 1 in tokenizer.encode("a<plain one>", parse_special=False)
    assert tokenizer.token_bytes(size + 1) == b"<plain one>"
    assert [tokenizer.is_special(i) for i in (turn, size, size + 1)] == [True, True, False]
    assert tokenizer.eos_id == size


def test_added_tokens_json_extends_the_vocabulary_too(model, tmp_path):
    size = len(pb.ModelProto.FromString(model).pieces)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<pad>": size}))
    assert load.from_folder(folder_of(tmp_path, model)).encode("<pad>") == [size]


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"added_tokens_decoder": {"9999": {"content": "<x>"}}}, "'<x>' has id 9999.*without a gap"),
        ({"added_tokens_decoder": {"1": {}}}, "added_tokens_decoder is malformed"),
        ({"added_tokens_decoder": []}, "added_tokens_decoder is malformed"),
        ({"eos_token": "<nowhere>"}, "eos_token '<nowhere>' is not in the vocabulary"),
        ({"add_eos_token": True}, "add_eos_token is true"),
    ],
)
def test_a_configuration_that_does_not_fit_the_model_is_an_error(config, why, model, tmp_path):
    with pytest.raises(TokenizerError, match=why):
        load.from_folder(folder_of(tmp_path, model, **config))


def test_a_truncated_or_foreign_tokenizer_model_is_an_error_that_names_it(model, tmp_path):
    for data in (b"", b"no model at all", model[:-7], model[: len(model) // 2]):
        with pytest.raises(TokenizerError, match=r"tokenizer\.model|SentencePiece refuses"):
            load.from_folder(folder_of(tmp_path, data))


def test_whitespace_as_suffix_is_refused_by_name(tmp_path):
    with pytest.raises(TokenizerError, match="treat_whitespace_as_suffix"):
        load.from_folder(folder_of(tmp_path, train(treat_whitespace_as_suffix=True)))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"scores": None}, "no tokenizer.ggml.scores"),
        ({"scores": [0.0]}, "scores has 1 entries"),
        ({"token_type": "x"}, "token_type is 'x'; expected list"),
        ({"unknown_token_id": -1}, "unknown_token_id is -1, outside"),
    ],
)
def test_broken_gguf_metadata_is_an_error_that_names_the_key(changes, why, model):
    with pytest.raises(TokenizerError, match=why):
        load.from_gguf(gguf_of(model, **changes))


def test_gguf_pieces_that_make_no_model_are_an_error(model):
    types = gguf_of(model)["tokenizer.ggml.token_type"]
    with pytest.raises(TokenizerError, match=r"token 5 .* has type 9; known are \[1, 2, 3, 4, 5, 6\]"):
        load.from_gguf(gguf_of(model, token_type=[*types[:5], 9, *types[6:]]))
    tokens = gguf_of(model)["tokenizer.ggml.tokens"]
    with pytest.raises(TokenizerError, match="SentencePiece refuses"):
        load.from_gguf(gguf_of(model, tokens=[*tokens[:-1], tokens[-2]]))
    byte = tokens.index("<0xE4>")
    with pytest.raises(TokenizerError, match="'<0xZZ>' is not of the form"):
        load.from_gguf(gguf_of(model, tokens=[*tokens[:byte], "<0xZZ>", *tokens[byte + 1 :]]))
