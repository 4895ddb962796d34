"""BPE from GGUF metadata and from tokenizer.json, against the `tokenizers` package's own pipeline."""

from __future__ import annotations

import json

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from jaxserve.errors import TokenizerError
from jaxserve.tokenizer import load, pretokenizers

CORPUS = ["the cat sat on the mat", "naïve café 你好 👩‍💻", "don't 123 4567", "  indented\n\n\tcode()"] * 3
TEXT = st.text(st.sampled_from("the cat sńé你👩12' \n\t<|>") | st.characters(exclude_categories=("Cs",)))


def train_byte_level() -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=320, show_progress=False, initial_alphabet=alphabet)
    )
    tokenizer.add_special_tokens(["<|bos|>", "<|end|>", "<|é|>"])
    tokenizer.add_tokens(["    ", "<tool>"])
    return tokenizer


def with_byte_fallback() -> tokenizers.Tokenizer:
    """Laid out as the tokenizer.json of SentencePiece models: words start with U+2581, bytes are <0xHH>."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{byte:02X}>": 3 + byte for byte in range(256)}
    for piece in ["▁", "t", "h", "e", "c", "a", "th", "the", "▁the", "ca", "▁ca", "▁▁"]:
        vocab[piece] = len(vocab)
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("c", "a"), ("▁", "ca"), ("▁", "▁")]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


def folder_of(tmp_path, tokenizer, **config):
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("make", [train_byte_level, with_byte_fallback])
def test_tokenizer_json_encodes_and_decodes_as_the_package_does(make, tmp_path):
    theirs = make()
    ours = load.from_folder(folder_of(tmp_path, theirs))
    assert ours.vocab_size == theirs.get_vocab_size(with_added_tokens=True)
    ids_of_text = st.builds(lambda text: theirs.encode(text, add_special_tokens=False).ids, TEXT)
    # The package decodes an added token by the letters of bytes, so one with an é comes out broken.
    right_there = [i for i in range(ours.vocab_size) if ours.token_text(i) != "<|é|>"]
    any_ids = st.lists(st.sampled_from(right_there), max_size=20)

    @given(TEXT, ids_of_text | any_ids)
    def check(text, ids):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids
        for skip_special in (True, False):
            found = ours.decode(ids, skip_special=skip_special)
            if "\ufffd" not in found:  # the package counts the bytes of broken characters otherwise
                assert found == theirs.decode(ids, skip_special_tokens=skip_special)

    check()


@pytest.mark.parametrize("make", [train_byte_level, with_byte_fallback])
def test_a_saved_tokenizer_json_reads_back_identically(make, tmp_path):
    (source := tmp_path / "a").mkdir()
    (target := tmp_path / "b").mkdir()
    first = load.from_folder(
        folder_of(source, make(), eos_token="<|end|>" if make is train_byte_level else "</s>")
    )
    load.save(first, target)
    second = load.from_folder(target)
    assert second.boundaries == first.boundaries
    text = "the naïve 👩‍💻<|end|>    <tool> cat</s>"
    assert second.encode(text) == first.encode(text)
    ids = range(first.vocab_size)
    assert [second.token_bytes(i) for i in ids] == [first.token_bytes(i) for i in ids]
    assert [second.is_special(i) for i in ids] == [first.is_special(i) for i in ids]


def test_byte_fallback_tokens_are_bytes_and_marked_spaces_are_spaces(tmp_path):
    tokenizer = load.from_folder(folder_of(tmp_path, with_byte_fallback()))
    ids = tokenizer.encode("the é")
    assert [tokenizer.token_bytes(i) for i in ids] == [b"the", b" ", b"\xc3", b"\xa9"]


def test_added_tokens_stand_for_their_own_text_whatever_their_letters(tmp_path):
    tokenizer = load.from_folder(folder_of(tmp_path, train_byte_level()))
    for text in ("<|é|>", "    ", "<tool>"):
        (token_id,) = tokenizer.encode(text)
        assert tokenizer.token_bytes(token_id) == text.encode()
    assert tokenizer.is_special(tokenizer.encode("<|é|>")[0])
    assert not tokenizer.is_special(tokenizer.encode("<tool>")[0])


def test_a_tokenizer_json_that_cuts_or_pads_texts_no_longer_does(tmp_path):
    theirs = train_byte_level()
    theirs.enable_truncation(2)
    theirs.enable_padding(length=50)
    text = "the cat sat on the mat"
    ours = load.from_folder(folder_of(tmp_path, theirs))
    assert ours.decode(ours.encode(text)) == text


def test_a_post_processor_that_adds_bos_makes_the_model_want_it_and_is_not_run(tmp_path):
    theirs = train_byte_level()
    bos = theirs.token_to_id("<|bos|>")
    theirs.post_processor = processors.TemplateProcessing("<|bos|> $A", special_tokens=[("<|bos|>", bos)])
    ours = load.from_folder(folder_of(tmp_path, theirs))
    assert (ours.add_bos, ours.bos_id) == (True, bos)
    assert bos not in ours.encode("a")
    assert ours.encode("a", add_bos=True) == [bos, *ours.encode("a")] == theirs.encode("a").ids


def test_a_post_processor_that_ends_texts_is_refused(tmp_path):
    theirs = train_byte_level()
    end = theirs.token_to_id("<|end|>")
    theirs.post_processor = processors.TemplateProcessing("$A <|end|>", special_tokens=[("<|end|>", end)])
    with pytest.raises(TokenizerError, match=r"ends every text with \['<\|end\|>'\]"):
        load.from_folder(folder_of(tmp_path, theirs))


def wordpiece():
    return tokenizers.Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))


def bpe(decoder=None, **options):
    tokenizer = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, [], **options))
    if decoder is not None:
        tokenizer.decoder = decoder
    return tokenizer


@pytest.mark.parametrize(
    ("tokenizer", "why"),
    [
        (wordpiece(), "WordPiece"),
        (bpe(), "no decoder"),
        (bpe(decoders.ByteLevel(), dropout=0.5), "dropout 0.5"),
        (bpe(decoders.BPEDecoder(), end_of_word_suffix="</w>"), "end_of_word_suffix '</w>'"),
        (bpe(decoders.ByteLevel(), continuing_subword_prefix="##"), "continuing_subword_prefix '##'"),
        (bpe(decoders.CTC()), "decoder step .*CTC"),
        (bpe(decoders.Sequence([decoders.Replace("_", "-")])), "decoder step .*Replace"),
    ],
)
def test_a_tokenizer_json_of_another_kind_is_refused_by_name(tokenizer, why, tmp_path):
    with pytest.raises(TokenizerError, match=why):
        load.from_folder(folder_of(tmp_path, tokenizer))


GGUF_PIPELINES = {
    "gpt-2": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "smollm": pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
}
GGUF_PIPELINES |= {"phi-2": GGUF_PIPELINES["gpt-2"], "olmo": GGUF_PIPELINES["gpt-2"]}
GGUF_PIPELINES |= {"refact": GGUF_PIPELINES["smollm"], "starcoder": GGUF_PIPELINES["smollm"]}
GGUF_PIPELINES |= {
    "deepseek-coder": pre_tokenizers.Sequence([
        *(
            pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")
            for pattern in ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥ࠀ-一가-퟿]+")
        ),
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(GGUF_PIPELINES))
def test_a_pre_tokenizer_cuts_words_as_the_models_own_pipeline_does(name):
    ours = pretokenizers.named(name).build()

    @given(TEXT)
    def check(text):
        assert ours.pre_tokenize_str(text) == GGUF_PIPELINES[name].pre_tokenize_str(text)

    check()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("llama-bpe", "12345 I'LL\n\n go!!\n", ["123", "45", " I", "'LL", "\n\n", " go", "!!\n"]),
        ("qwen2", "12345 I'LL\n\n go!!\n", ["1", "2", "3", "4", "5", " I", "'LL", "\n\n", " go", "!!\n"]),
        ("default", "a+b 12345 c", ["a", "+", "b", " ", "123", "45", " c"]),
        ("dbrx", "12345 I'LL\n\n go!!\n", ["123", "45", " I", "'LL", "\n\n", " go", "!!\n"]),
        (
            "gpt-4o",
            "12345 I'LL HTTPServer//\n e\u0301t\u00c9",
            ["123", "45", " I'LL", " HTTPServer", "//\n", " e\u0301t", "\u00c9"],
        ),
        ("gpt-4o", "helloWorld don'T  x", ["hello", "World", " don'T", " ", " x"]),
        (
            "deepseek-llm",
            "12 don't\n 你好. ƻñ",
            ["1", "2", " don", "'", "t", "\n", " ", "你好", ".", " ƻ", "ñ"],
        ),
        ("deepseek-llm", "(x) \t ", ["(", "x", ")", " \t "]),
        ("deepseek-coder", "a_b+12 你好", ["a", "_", "b", "+", "1", "2", " ", "你好"]),
        ("deepseek-v3", "1234 .a .\n\nカナ漢字x!", ["123", "4", " .", "a", " .\n\n", "カナ漢字", "x", "!"]),
        ("deepseek-v3", "(x._y", ["(x", "._", "y"]),
        ("tekken", "12 aB don't c/d\n", ["1", "2", " a", "B", " don", "'t", " c", "/d", "\n"]),
    ],
)
def test_a_pre_tokenizer_cuts_words_as_its_pattern_says(name, text, words):
    cut = pretokenizers.named(name).build().pre_tokenize_str(text)
    assert [text[start:end] for _, (start, end) in cut] == words


def gguf_of(theirs: tokenizers.Tokenizer, **changes):
    """GGUF metadata of a byte-level BPE tokenizer, as the converters write it."""
    state = json.loads(theirs.to_str())
    vocab = theirs.get_vocab(with_added_tokens=True)
    tokens = sorted(vocab, key=vocab.__getitem__)
    added = theirs.get_added_tokens_decoder()
    kinds = {True: 3, False: 4}
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [
            kinds[added[i].special] if i in added else 1 for i in range(len(tokens))
        ],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in state["model"]["merges"]],
        "tokenizer.ggml.eos_token_id": vocab["<|end|>"],
        "tokenizer.ggml.bos_token_id": vocab["<|bos|>"],
    }
    for key, value in changes.items():
        metadata[f"tokenizer.ggml.{key}"] = value
    return {key: value for key, value in metadata.items() if value is not None}


def test_gguf_metadata_gives_the_same_ids_as_the_tokenizer_json_it_was_made_from():
    theirs = train_byte_level()
    ours = load.from_gguf(gguf_of(theirs))

    @given(TEXT)
    def check(text):
        assert ours.encode(text) == theirs.encode(text, add_special_tokens=False).ids

    check()
    assert ours.is_special(ours.eos_id)
    assert not ours.add_bos


def test_a_word_that_is_a_token_needs_no_merges_where_the_pre_tokenizer_says_so():
    theirs = train_byte_level()
    tokens = [*sorted(theirs.get_vocab(), key=theirs.get_vocab().__getitem__), "zebra"]
    changes = {"tokens": tokens, "token_type": None, "pre": "llama-bpe"}
    assert load.from_gguf(gguf_of(theirs, **changes)).encode("zebra") == [len(tokens) - 1]
    assert len(load.from_gguf(gguf_of(theirs, **changes | {"pre": "gpt-2"})).encode("zebra")) > 1


def test_llama_bpe_wants_bos_unless_the_file_says_otherwise():
    theirs = train_byte_level()
    assert load.from_gguf(gguf_of(theirs, pre="llama-bpe")).add_bos
    assert not load.from_gguf(gguf_of(theirs, pre="llama-bpe", add_bos_token=False)).add_bos
    assert load.from_gguf(gguf_of(theirs, add_bos_token=True)).add_bos


def test_qwen2_composes_characters_first():
    tokenizer = load.from_gguf(gguf_of(train_byte_level(), pre="qwen2"))
    assert tokenizer.encode("e\u0301") == tokenizer.encode("\u00e9")


def test_end_tokens_that_a_file_calls_normal_are_special_all_the_same():
    theirs = train_byte_level()
    tokenizer = load.from_gguf(gguf_of(theirs, token_type=None))
    assert tokenizer.is_special(tokenizer.eos_id)
    assert tokenizer.encode("<|end|>") == [tokenizer.eos_id]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"model": None}, "no tokenizer.ggml.model"),
        ({"model": "bert"}, "model is 'bert'"),
        (
            {"pre": "bloom"},
            "pre is 'bloom'; supported are dbrx, .*, default, gpt-2, gpt-4o, llama-bpe, .*tekken",
        ),
        ({"tokens": None}, "no tokenizer.ggml.tokens"),
        ({"tokens": "abc"}, "tokens is 'abc'; expected list"),
        ({"tokens": []}, "tokens is empty"),
        ({"tokens": ["a", 7]}, r"tokens\[1\] is 7; expected str"),
        (
            {"tokens": ["a", "b", "a"], "token_type": None, "eos_token_id": 0, "bos_token_id": 0},
            "stands twice",
        ),
        ({"token_type": [1, 1]}, r"token_type has 2 entries"),
        ({"merges": None}, "no tokenizer.ggml.merges"),
        ({"merges": ["t h", "th"]}, "merge 1 is 'th'"),
        ({"merges": ["qq zz"]}, "vocabulary is broken: .*`qq` out of vocabulary"),
        ({"eos_token_id": 10**6}, "eos_token_id is 1000000, outside the vocabulary"),
        ({"bos_token_id": "x"}, "bos_token_id is 'x'; expected int"),
        ({"bos_token_id": None, "add_bos_token": True}, "names no BOS token"),
        ({"add_eos_token": True}, "add_eos_token is true"),
        ({"add_space_prefix": True}, "add_space_prefix is true"),
    ],
)
def test_broken_gguf_metadata_is_an_error_that_names_the_key(changes, why):
    with pytest.raises(TokenizerError, match=why):
        load.from_gguf(gguf_of(train_byte_level(), **changes))


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"model": {"type": "BPE"}}', "\ufffe"])
def test_a_broken_tokenizer_json_is_an_error_that_names_the_file(text, tmp_path):
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json is no valid"):
        load.from_folder(tmp_path)


def test_flags_of_added_tokens_are_honoured(tmp_path):
    theirs = train_byte_level()
    theirs.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    ours = load.from_folder(folder_of(tmp_path, theirs))
    assert ours.encode("cat <mask>") == [*ours.encode("cat"), theirs.token_to_id("<mask>")]
