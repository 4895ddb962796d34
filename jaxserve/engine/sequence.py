"""One request on its way through the engine, as the scheduler sees it."""

from __future__ import annotations

from enum import Enum

from jaxserve.types import Request


class SequenceState(Enum):
    WAITING = "waiting"  # for a slot and pages
    PREFILL = "prefill"  # in a slot; a part of the prompt is still to be launched
    DECODE = "decode"  # in a slot; every further step feeds one token
    ENDING = "ending"  # its last step is launched, slot and pages are free again, ids are outstanding
    FINISHED = "finished"  # whatever still comes back from the device for it is dropped


class Sequence:
    """Mutable; the scheduler is its one owner, all others read.

    The device is one launch ahead of what the host has read, so positions count what was launched and
    `output_ids` what came back:

        prompt_ids ............ output_ids ... ids not read yet
        0                       num_prompt     num_prompt + num_launched_outputs
        in cache: [0, num_cached) once the launched steps have run
    """

    __slots__ = (
        "admitted_s",
        "first_token_s",
        "last_token_s",
        "num_cached",
        "num_launched_outputs",
        "num_prompt",
        "num_reserved_pages",
        "output_ids",
        "pages",
        "request",
        "slot",
        "state",
    )

    def __init__(self, request: Request, num_reserved_pages: int):
        self.request = request
        self.num_prompt = len(request.prompt_ids)
        self.num_reserved_pages = num_reserved_pages  # the most it can come to hold
        self.state = SequenceState.WAITING
        self.slot: int | None = None
        self.pages: list[int] = []  # in order of position
        self.num_cached = 0
        self.num_launched_outputs = 0
        self.output_ids: list[int] = []
        self.admitted_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s: float | None = None

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id!r}, {self.state.value}, slot={self.slot}, "
            f"cached={self.num_cached}/{self.num_prompt}, outputs={self.num_launched_outputs})"
        )
