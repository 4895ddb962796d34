"""What crosses module borders: frozen data, no jax, no behaviour beyond validation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, NamedTuple, Protocol

if TYPE_CHECKING:
    import numpy as np

FinishReason = Literal["stop", "length", "abort", "error", "timeout", "grammar"]
WaitReason = Literal["slots", "pages"]
Pooling = Literal["last", "mean"]  # of a prompt's hidden states, to its embedding

# How much of a request's wishes the device keeps for a slot.
MAX_LOGIT_BIAS = 1024  # ids of `logit_bias`
MAX_BAD_WORD_SEQUENCES, MAX_BAD_WORD_TOKENS = 256, 16  # of `bad_words`, and the longest of them
MAX_MASKED_END_IDS = 128  # that `min_tokens` holds back: end-of-sequence ids and `stop_token_ids`


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to pick tokens and when to stop. Values are already validated by the front end.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 switch that filter off.
    `seed` is the request's own 64-bit seed; the front end draws one when the client gave none, so the
    engine never has to. The random key of a token is fold_in(key(seed), position).
    """

    max_tokens: int  # 0: compute the prompt, for its log-probabilities or its embedding
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()  # beside the model's own end-of-sequence ids
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    shown_ids: frozenset[int] = frozenset()  # special tokens that are shown all the same
    # What changes the logits, in the order of ops/shaping.py, which says what each does.
    logit_bias: tuple[tuple[int, float], ...] = ()  # (id, what is added to its logit), each id once
    repetition_penalty: float = 1.0  # of tokens of prompt and output; 1 is off
    frequency_penalty: float = 0.0  # of output tokens, for each time they came
    presence_penalty: float = 0.0  # of output tokens, once
    bad_words: tuple[tuple[int, ...], ...] = ()  # sequences of ids that the output shall not have
    min_tokens: int = 0  # no end-of-sequence id, stop token or stop string ends the output before
    allowed_token_ids: frozenset[int] | None = None  # None: all
    # How many of the likeliest tokens to tell of beside each token itself; 0: only of itself; None: nothing.
    logprobs: int | None = None  # of generated tokens
    prompt_logprobs: int | None = None  # of prompt tokens; a prefix hit never covers what is yet to be told

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.frequency_penalty != 0 or self.presence_penalty != 0

    @property
    def is_shaped(self) -> bool:
        """Whether tokens are picked from other logits than the model's."""
        return bool(
            self.has_penalties or self.logit_bias or self.bad_words or self.min_tokens
            or self.allowed_token_ids is not None
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the model thought of one token at its place, and of others there, in natural logarithms.

    Of the model's own distribution: temperature 1, before any penalty, bias or filter.
    """

    token_id: int
    logprob: float
    rank: int  # 1 is the likeliest
    top_ids: tuple[int, ...]  # the likeliest first; as many as were asked for
    top_logprobs: tuple[float, ...]  # if the token is among them, its figure has the same bits


class GrammarState(Protocol):
    """Where one answer stands in its grammar. Calls never overlap; which thread makes them doesn't matter.

    Both methods raise GrammarError when the answer can't go on, GrammarLimitError where that is too costly.
    """

    def advance(self, token_id: int) -> None:
        """Take the next id of the answer."""
        ...

    def fill(self, words: np.ndarray) -> None:
        """Set `words`, int32 [ceil(V / 32)]: bit i % 32 of word i // 32 tells whether id i may come next."""
        ...

    @property
    def is_complete(self) -> bool:
        """Nothing but an end-of-sequence id may follow."""
        ...


class Grammar(Protocol):
    """What an answer must look like; compiled, immutable, for any number of answers."""

    def start(self) -> GrammarState: ...


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue. `arrival_s` is `time.monotonic()` when the server read the request."""

    request_id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrival_s: float
    priority: int = 0  # lower is sooner, where the engine goes by priority
    timeout_s: float | None = None  # from arrival to the last token; None: as long as it takes
    cache_salt: str | None = None  # prompts share cached pages only with prompts of the same salt
    grammar: Grammar | None = None  # picks are restricted to ids that it allows
    group: str | None = None  # requests of one group have one prompt: the first computes it for all
    embeds: bool = False  # the answer is the prompt's embedding; `max_tokens` is 0


@dataclass(frozen=True, slots=True)
class Timeline:
    """When a request passed each stage, in `time.monotonic()` seconds. None: never got there."""

    arrival_s: float
    admitted_s: float | None = None  # given a slot: end of queueing, start of prefill
    first_token_s: float | None = None  # end of prefill
    last_token_s: float | None = None
    finished_s: float | None = None


class Event(NamedTuple):  # one is made for every token: a dataclass takes three times as long
    """Progress of one request, in order. The last event of a request has a `finish_reason`.

    `token_ids` are the ids sampled since the last event; ids of a stop token that ended the request are
    included (usage counts them), their text is not. `text` is what is now safe to show: never a part of
    a character, never a part of a stop string; it may be empty while `token_ids` is not, and vice versa.
    A request whose `max_tokens` is 0 ends once its prompt is computed, with one event without ids.
    """

    request_id: str
    time_s: float
    token_ids: tuple[int, ...] = ()
    text: str = ""
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or stop token id that ended it
    error: str | None = None  # with "error" (for the log), "timeout" or "grammar" (for the client)
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0  # so far, this event included
    num_cached_tokens: int = 0  # prompt tokens that the prefix cache gave
    timeline: Timeline | None = None  # on the last event only
    logprobs: tuple[TokenLogprobs, ...] = ()  # of `token_ids`, one each, if the request asked for them
    # Of all prompt tokens, the first, which nothing predicts, being None; with the first id, if asked for.
    prompt_logprobs: tuple[TokenLogprobs | None, ...] | None = None
    embedding: np.ndarray | None = None  # [H] float32 of length 1, read-only; with the end, if asked for


# Upper bounds of the durations of steps that are counted together.
STEP_TIME_BOUNDS_S = (
    *(0.0001, 0.00025, 0.0005, 0.00075, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5),
    *(1.0, 2.5, 5.0, 10.0, 25.0, 60.0),
)


@dataclass(frozen=True, slots=True)
class Durations:
    """How many durations lie up to each of STEP_TIME_BOUNDS_S from the one before, and above the last."""

    counts: tuple[int, ...] = (0,) * (len(STEP_TIME_BOUNDS_S) + 1)
    sum_s: float = 0.0


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """What a loaded model takes of the device's memory, and what fits into its KV cache."""

    weights_bytes: int  # as the backend keeps them
    kv_bytes: int
    kv_bytes_per_token: int  # of all layers
    kv_tokens: int  # that the pool holds
    max_model_len: int
    num_full_requests: int  # requests of `max_model_len` tokens that the pool holds at a time


class KernelsInUse(NamedTuple):
    """What attention and linear layers run on; `kernels` is for people."""

    attention_backend: str
    linear_backend: str
    kernels: str


class EngineStats(NamedTuple):  # one is made in every turn: see Event
    """A consistent snapshot of the engine, cheap to take from any thread."""

    num_running: int = 0
    num_waiting: int = 0
    wait_reason: WaitReason | None = None  # what the first in line waits for
    num_queued_tokens: int = 0  # prompt tokens of those who wait
    num_preemptions: int = 0  # in all
    mean_output: float = 0.0  # tokens that a request generated lately
    tokens_per_s: float = 0.0  # prompt and output tokens lately, while there was work
    num_pages_total: int = 0  # usable pages: the trash page is not counted
    num_pages_used: int = 0  # held by requests: cached pages that nobody holds are free
    num_pages_cached: int = 0  # of the free ones, those that a prompt may find again
    num_queried_tokens: int = 0  # prompt tokens looked up in the prefix cache, in all
    num_hit_tokens: int = 0  # those of them that were found
    num_steps: Mapping[str, int] = MappingProxyType({})  # by kind: "prefill", "decode"
    num_slow_steps: int = 0  # turns that took longer than step_timeout_s, in all
    num_faults: int = 0  # times that slots or pages were missing when nobody was left
    host_time_s: float = 0.0  # engine thread busy outside of waiting for the device
    device_wait_s: float = 0.0  # engine thread blocked in fetch
    host_times: Durations = Durations()  # engine thread at work, by turn; a turn launches one step
    device_times: Durations = Durations()  # from a step's launch, or the end of the one before, to its end
    state: Literal["starting", "ready", "draining", "dead"] = "ready"
    reason: str | None = None  # why it is not ready
