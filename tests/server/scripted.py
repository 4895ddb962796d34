"""A fake model that answers what a test tells it to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from jaxserve.types import SamplingParams
from tests.fakes import EOS, TURN, FakeModel, FakeTokenizer


@dataclass(frozen=True)
class ScriptedModel(FakeModel):
    """The text of `script` after the last <turn>assistant\\n, id by id, then the EOS.

    Held to a grammar, it says what it may of that and picks at random where it may not.
    """

    script: tuple[int, ...] = ()
    opening: tuple[int, ...] = ()  # that the prompt's template puts behind <turn>assistant\\n

    def next_id(
        self, context: Sequence[int], params: SamplingParams, allowed: Sequence[int] | None = None
    ) -> int:
        begun = len(context) - 1 - list(reversed(context)).index(TURN)
        at = len(context) - begun - 1 - len("assistant\n") - len(self.opening)
        wanted = self.script[at] if at < len(self.script) else EOS
        if allowed is None or wanted in allowed:
            return wanted
        return super().next_id(context, params, allowed)


def scripted(text: str, *, opening: str = "", tokenizer: FakeTokenizer | None = None) -> ScriptedModel:
    encode = (tokenizer or FakeTokenizer()).encode
    return ScriptedModel(script=tuple(encode(text)), opening=tuple(encode(opening)))
