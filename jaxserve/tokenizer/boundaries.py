"""Which ids begin and end a text, from whatever a model file says about it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from jaxserve.errors import TokenizerError
from jaxserve.tokenizer.table import Boundaries

# Control tokens that end a turn in some model family. Files often name only one end id, and the others
# are known by their text alone; llama.cpp keeps the same list.
END_TEXTS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<｜end▁of▁sentence｜>",
)


def make_boundaries(
    ids_by_text: Mapping[str, int],
    special: frozenset[int],
    *,
    vocab_size: int,
    bos_id: int | None,
    eos_ids: Sequence[int],  # as the file lists them, the main one first
    add_bos: bool,
) -> Boundaries:
    """Add the well-known end tokens among the special ones to what the file lists, and check ranges."""
    named: Iterable[tuple[str, int | None]] = [("bos", bos_id), *(("eos", i) for i in eos_ids)]
    for name, token_id in named:
        if token_id is not None and not 0 <= token_id < vocab_size:
            raise TokenizerError(
                f"{name} token id {token_id} is outside the vocabulary of {vocab_size} tokens"
            )
    if add_bos and bos_id is None:
        raise TokenizerError("the model wants a BOS token at the start (add_bos), but names no BOS token")
    ends = {text: ids_by_text[text] for text in END_TEXTS if ids_by_text.get(text) in special}
    if "<|return|>" in ends and "<|call|>" in ends:
        ends.pop("<|end|>", None)  # in the harmony format it ends a message within a turn, not the turn
    all_ids = frozenset(eos_ids) | frozenset(ends.values())
    return Boundaries(bos_id=bos_id, eos_id=eos_ids[0] if eos_ids else None, eos_ids=all_ids, add_bos=add_bos)
