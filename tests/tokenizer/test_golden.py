"""The real vocabularies against the reference's ids and texts."""

from __future__ import annotations

import pytest

from jaxserve.tokenizer import load
from jaxserve.tokenizer.chat import chat_template, encode_chat
from jaxserve.tokenizer.template_files import templates_from_gguf


def check_golden(tokenizer, golden) -> None:
    assert len(golden["tokenize"]) > 20
    for case in golden["tokenize"]:
        assert tokenizer.encode(case["text"]) == case["ids"], case["text"]
        assert tokenizer.decode(case["ids"], skip_special=False) == case["text"]
    for case in golden["generate"]:
        assert tokenizer.encode(case["prompt"], add_bos=tokenizer.add_bos) == case["prompt_ids"]
        assert tokenizer.decode(case["greedy_ids"], skip_special=False) == case["greedy_text"]


def test_every_golden_text_gives_the_reference_ids_and_every_completion_its_text(real):
    check_golden(*real)


def test_every_golden_case_holds_after_saving_to_a_folder_and_loading_it(real, tmp_path):
    tokenizer, golden = real
    load.save(tokenizer, tmp_path)
    again = load.from_folder(tmp_path)
    check_golden(again, golden)
    assert again.boundaries == tokenizer.boundaries
    assert again.vocab_size == tokenizer.vocab_size
    for i in range(-1, tokenizer.vocab_size + 1):
        assert again.token_bytes(i) == tokenizer.token_bytes(i)
        assert again.token_text(i) == tokenizer.token_text(i)
        assert again.is_special(i) == tokenizer.is_special(i)


def test_every_golden_conversation_renders_and_encodes_as_the_reference_does(
    smollm2, smollm2_metadata, smollm2_golden
):
    template = chat_template(smollm2, templates_from_gguf(smollm2_metadata)["default"])
    assert smollm2_golden["chat"]
    for case in smollm2_golden["chat"]:
        assert template.render(case["messages"]) == case["rendered"]
        assert encode_chat(smollm2, template, case["messages"]) == case["ids"]


def test_a_base_model_has_no_chat_template(gemma3_metadata):
    assert templates_from_gguf(gemma3_metadata) == {}


def test_the_ends_of_both_models_are_all_known(smollm2, gemma3):
    ends = {smollm2.token_text(i) for i in smollm2.eos_ids}
    assert ends == {"<|im_end|>", "<|endoftext|>"}
    assert (smollm2.bos_id, smollm2.eos_id, smollm2.add_bos) == (1, 2, False)
    assert {gemma3.token_text(i) for i in gemma3.eos_ids} == {"<eos>", "<end_of_turn>"}
    assert (gemma3.bos_id, gemma3.eos_id, gemma3.add_bos) == (2, 1, True)


def test_special_text_is_ordinary_text_when_it_is_not_parsed(real):
    tokenizer, _ = real
    special = tokenizer.token_text(tokenizer.eos_id)
    text = f"a {special} b"
    assert tokenizer.eos_id in tokenizer.encode(text)
    plain = tokenizer.encode(text, parse_special=False)
    assert not any(tokenizer.is_special(i) for i in plain)
    assert tokenizer.decode(plain) == text


def test_skipping_special_tokens_leaves_exactly_the_other_text(real):
    tokenizer, _ = real
    ids = tokenizer.encode(f"a{tokenizer.token_text(tokenizer.eos_id)} b", add_bos=True)
    assert ids[0] == tokenizer.bos_id
    assert tokenizer.decode(ids) == "a b"


def test_ids_outside_the_vocabulary_stand_for_nothing(real):
    tokenizer, _ = real
    for token_id in (-1, tokenizer.vocab_size, 10**9):
        assert tokenizer.token_bytes(token_id) == b""
        assert tokenizer.token_text(token_id) == ""
        assert not tokenizer.is_special(token_id)
    assert tokenizer.decode([-1, tokenizer.vocab_size]) == ""


def test_a_token_keeps_its_leading_space_at_the_start_of_a_completion(real):
    tokenizer, _ = real
    (token_id,) = tokenizer.encode(" Paris")
    assert tokenizer.token_bytes(token_id) == b" Paris"
    assert tokenizer.decode([token_id]) == " Paris"


@pytest.mark.parametrize(
    "text", ["x" * 200_000, " " * 200_000, "\n \n" * 50_000, "<" * 100_000, "é你👩‍💻" * 50_000]
)
def test_long_repetitive_texts_come_back_whole(real, text):
    tokenizer, _ = real
    assert tokenizer.decode(tokenizer.encode(text)) == text
