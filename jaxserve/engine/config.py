"""The engine's limits, and the static shapes that follow from them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from functools import cached_property
from math import lcm
from typing import Literal

from jaxserve.errors import ConfigError
from jaxserve.types import Pooling

Shape = tuple[int, int]  # (B, Q)
# A better `max_prefill_tokens` where the device is a CPU: there more rows make a step no more efficient, only
# longer, and streams and the next prompt wait for it.
CPU_PREFILL_TOKENS = 128

FLAGS = {  # of `jaxserve serve`, where they are called otherwise
    "page_size": "--block-size",
    "max_num_queued": "--max-num-queued-reqs",
    "queue_timeout_s": "--queue-timeout",
    "step_timeout_s": "--step-timeout",
    "max_prefill_tokens": "--max-num-batched-tokens",
}


@dataclass(frozen=True)
class EngineConfig:
    """Every limit of the engine. Buckets, chunk and admission derive from it and from nothing else.

    `decode_buckets` and `prefill_buckets` are derived where they are left empty. `dataclasses.replace`
    carries the derived lists over: pass `()` for them there to derive anew. Raises ConfigError, which names
    the key, and the flag where that has another name.
    """

    max_model_len: int  # tokens of a sequence, prompt and output together
    num_pages: int  # of the pool, page 0 included; page 0 takes the writes of padding rows
    page_size: int = 16  # KV positions of a page
    max_num_seqs: int = 32  # slots
    max_num_queued: int = 1024  # requests that may wait for a slot or for pages
    max_queued_tokens: int = 1 << 20  # of the prompts of those requests
    queue_timeout_s: float | None = None  # how long a request may wait for its slot; None: for ever
    step_timeout_s: float = 60.0  # a turn that takes longer is logged and counted
    scheduling_policy: Literal["fcfs", "priority"] = "fcfs"
    admission: Literal["optimistic", "reserve"] = "optimistic"  # see engine/admission.py
    max_prefill_tokens: int = 512  # B * Q of a prefill step, padding included
    min_prefill_queries: int = 32  # smallest Q of a prefill step
    decode_steps: int = 1  # that one launch runs when nobody waits; see Scheduler
    min_decode_batch: int = 2  # smallest B of a decode step: on CPU one row costs more than two
    window: int | None = None  # keys that any layer of the model sees, the query's own included; None: all
    enable_prefix_caching: bool = True  # full pages are found again by prompts that begin alike
    prefix_alignment: int | None = None  # hits end at a multiple of so many tokens; None: of page_size
    deterministic: bool = False  # a request's bits don't depend on others; see docs/determinism.md
    max_logprobs: int = 20  # of the likeliest tokens that a request may ask for at each place
    pooling: Pooling = "last"  # an embedding is the hidden state of the last token, or the mean over all
    prefill_step_cost: int = 64  # fixed cost of one more prefill step, in padded tokens
    decode_buckets: tuple[int, ...] = ()  # B, ascending
    prefill_buckets: tuple[Shape, ...] = ()  # (B, Q), cheapest first

    def __post_init__(self) -> None:
        for item in fields(self):
            if item.type == "int":
                lowest = 0 if item.name in ("max_num_queued", "max_logprobs", "prefill_step_cost") else 1
                _require_int(item.name, getattr(self, item.name), lowest)
        _require_one_of("scheduling_policy", self.scheduling_policy, ("fcfs", "priority"))
        _require_one_of("admission", self.admission, ("optimistic", "reserve"))
        _require_one_of("pooling", self.pooling, ("last", "mean"))
        _require_seconds("step_timeout_s", self.step_timeout_s)
        if self.queue_timeout_s is not None:
            _require_seconds("queue_timeout_s", self.queue_timeout_s)
        _require_bool("deterministic", self.deterministic)
        if self.deterministic and self.decode_steps > 1:
            raise ConfigError(
                f"decode_steps={self.decode_steps} contradicts deterministic: whether several steps share a "
                "launch depends on who waits; leave one of the two out"
            )
        self._check_prefix_caching()
        if self.window is not None:
            _require_int("window", self.window, 1)
        decode = self.decode_buckets or self._derive_decode_buckets()
        prefill = self.prefill_buckets or self._derive_prefill_buckets()
        self._check_decode_buckets(decode)
        self._check_prefill_buckets(prefill)
        object.__setattr__(self, "decode_buckets", tuple(decode))
        object.__setattr__(self, "prefill_buckets", tuple(sorted(prefill, key=lambda s: (s[0] * s[1], s[0]))))
        if self.num_usable_pages < self.most_pages:
            raise ConfigError(
                f"num_pages={self.num_pages} can't hold one sequence of max_model_len="
                f"{self.max_model_len}: with page_size={self.page_size} that takes "
                f"{self.most_pages + 1} pages, page 0 for padding included. Raise num_pages (more KV "
                "memory) or lower max_model_len"
            )

    @property
    def num_usable_pages(self) -> int:
        return self.num_pages - 1

    @property
    def turn_budget(self) -> int:
        """The most tokens, padding included, that the device works on between two tokens of a stream.

        One decode step of all who run and one prefill step: prefill does not get less when many decode,
        because its next smaller rectangle would be half as large. Several decode steps in one launch run
        only when nobody prefills.
        """
        batch = self.decode_buckets[-1]
        largest_prefill = max(batch * queries for batch, queries in self.prefill_buckets)
        return max(batch + largest_prefill, batch * self.decode_steps)

    @cached_property
    def hit_alignment(self) -> int:
        """Prefix hits end at a multiple of so many tokens; with `deterministic` at a border of chunks."""
        alignment = self.prefix_alignment or self.page_size
        return lcm(alignment, self.max_chunk) if self.deterministic else alignment

    @property
    def pages_per_seq(self) -> int:
        """Length of a page table row, P."""
        return self.pages_for(self.max_model_len)

    @cached_property
    def most_pages(self) -> int:
        """The most pages that one sequence holds at a time: fewer than P where a window slides over it."""
        if self.window is None:
            return self.pages_per_seq
        return min(
            self.pages_per_seq, pages_within(self.window, self.page_size, self.max_chunk, self.decode_steps)
        )

    @cached_property
    def max_chunk(self) -> int:
        """The most prompt tokens that one row of a prefill step takes."""
        return max(queries for _, queries in self.prefill_buckets)

    @cached_property
    def prefill_batches(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """`prefill_buckets` by Q: ((Q, (B, ...)), ...), both ascending."""
        by_queries: dict[int, list[int]] = {}
        for batch, queries in self.prefill_buckets:
            by_queries.setdefault(queries, []).append(batch)
        return tuple((queries, tuple(sorted(batches))) for queries, batches in sorted(by_queries.items()))

    def pages_for(self, num_tokens: int) -> int:
        """How many pages hold `num_tokens` positions."""
        return -(-num_tokens // self.page_size)

    def decode_bucket(self, num_rows: int) -> int:
        """The smallest listed B with room for `num_rows`, which is at most `max_num_seqs`."""
        for batch in self.decode_buckets:
            if batch >= num_rows:
                return batch
        raise AssertionError(f"{num_rows} decode rows for {self.max_num_seqs} slots")

    def prefill_bucket(self, num_rows: int, max_query_len: int) -> Shape | None:
        """The listed (B, Q) of least B * Q with room for such rows; None if no listed shape has it."""
        for shape in self.prefill_buckets:
            if shape[0] >= num_rows and shape[1] >= max_query_len:
                return shape
        return None

    def _check_prefix_caching(self) -> None:
        _require_bool("enable_prefix_caching", self.enable_prefix_caching)
        if self.prefix_alignment is not None:
            _require_int("prefix_alignment", self.prefix_alignment, 1)
            if self.prefix_alignment % self.page_size:
                raise ConfigError(
                    f"prefix_alignment={self.prefix_alignment} must be a multiple of page_size="
                    f"{self.page_size}: only full pages are shared"
                )

    def _derive_decode_buckets(self) -> tuple[int, ...]:
        largest = max(self.max_num_seqs, self.min_decode_batch)
        return (largest,) if self.deterministic else _doubling(self.min_decode_batch, largest)

    def _derive_prefill_buckets(self) -> tuple[Shape, ...]:
        smallest = min(self.min_prefill_queries, self.max_prefill_tokens)
        if self.deterministic:
            return tuple((1, queries) for queries in _doubling(smallest, self.max_prefill_tokens))
        return tuple(
            (1 << power, queries)
            for queries in _doubling(smallest, self.max_prefill_tokens)
            for power in range(min(self.max_num_seqs, self.max_prefill_tokens // queries).bit_length())
        )

    def _check_decode_buckets(self, buckets: Iterable[int]) -> None:
        buckets = list(buckets)
        for batch in buckets:
            _require_int("decode_buckets", batch, 1)
        if buckets != sorted(set(buckets)) or buckets[-1] < self.max_num_seqs:
            raise ConfigError(
                f"decode_buckets={buckets} must ascend and end at max_num_seqs={self.max_num_seqs} or above; "
                "leave the key out to derive it"
            )
        if self.deterministic and len(buckets) > 1:
            raise ConfigError(
                f"decode_buckets={buckets} contradicts deterministic: which of them a step takes depends on "
                f"how many decode; list only {buckets[-1]}, or leave the key out to derive it"
            )

    def _check_prefill_buckets(self, buckets: Iterable[Shape]) -> None:
        seen = set()
        for shape in buckets:
            if not isinstance(shape, tuple) or len(shape) != 2:
                raise ConfigError(f"prefill_buckets: {shape!r} is not a pair (batch, queries)")
            batch, queries = shape
            _require_int("prefill_buckets", batch, 1)
            _require_int("prefill_buckets", queries, 1)
            if batch * queries > self.max_prefill_tokens or batch > self.max_num_seqs:
                raise ConfigError(
                    f"prefill_buckets: {batch} x {queries} is over max_prefill_tokens="
                    f"{self.max_prefill_tokens} or max_num_seqs={self.max_num_seqs}; drop the shape or "
                    "raise the limit"
                )
            if self.deterministic and batch > 1:
                raise ConfigError(
                    f"prefill_buckets: {batch} x {queries} contradicts deterministic: a prompt must not "
                    "share a step; list shapes of one row only, or leave the key out to derive them"
                )
            if shape in seen:
                raise ConfigError(f"prefill_buckets: {batch} x {queries} is listed twice; drop one")
            seen.add(shape)


def pages_within(window: int, page_size: int, max_chunk: int, decode_steps: int) -> int:
    """The most pages that a sequence holds of which no layer sees more than the last `window` positions.

    That is when a step is launched: what its first query sees and all that it writes, or, under a short
    window, what can't be let go yet because the ids of two launches are unknown; and parts of pages at both
    ends.
    """
    kept = max(window - 1, 2 * decode_steps)
    return -(-(kept + max(max_chunk, decode_steps)) // page_size) + 1


def _doubling(first: int, last: int) -> tuple[int, ...]:
    """first, 2*first, 4*first, ... below `last`, then `last`."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)


def _require_one_of(key: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise _not(key, value, f"one of {', '.join(known)}")


def _require_seconds(key: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < float("inf"):
        raise _not(key, value, "a number of seconds above 0")


def _require_bool(key: str, value: object) -> None:
    if not isinstance(value, bool):
        raise _not(key, value, "true or false")


def _require_int(key: str, value: object, lowest: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        raise _not(key, value, f"a whole number of at least {lowest}")


def _not(key: str, value: object, wanted: str) -> ConfigError:
    flag = f" (flag {FLAGS[key]})" if key in FLAGS else ""
    return ConfigError(f"{key}={value!r} must be {wanted}{flag}")
