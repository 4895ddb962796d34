"""What the threads of the front ends and the engine thread share, behind one lock."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from math import ceil
from typing import Literal

from jaxserve.engine.config import EngineConfig
from jaxserve.errors import QueueFullError, RequestError, UnavailableError
from jaxserve.types import EngineStats, Request


@dataclass(frozen=True, slots=True)
class Abort:
    """The command to end a request."""

    request_id: str


Command = Request | Abort
SHORTEST_RETRY_S, LONGEST_RETRY_S = 1, 300


class Intake:
    """Commands in, figures out, and the life cycle: starting, ready, draining, dead.

    The lock is never held while the device, the tokenizer or `deliver` works, so no call but `wait` and
    `wait_settled` blocks.
    """

    def __init__(self, config: EngineConfig):
        self._config = config
        self._changed = threading.Condition()
        self._state: Literal["starting", "ready", "draining", "dead"] = "starting"
        self._reason: str | None = "not started"
        self._commands: list[Command] = []
        self._requests: dict[str, Request] = {}  # submitted and not ended, by id
        self._settled = True  # whoever was submitted has been sent the last event
        self._deadline_s: float | None = None  # of draining
        self._stopping = False
        self._num_arriving = 0  # requests among the commands
        self._num_arriving_tokens = 0  # of their prompts
        self._num_vacant = config.max_num_seqs  # slots that are free for those who arrive now
        self._stats = EngineStats(num_pages_total=config.num_usable_pages)

    # For front ends.

    def submit(self, request: Request) -> None:
        """Raises UnavailableError, QueueFullError, or RequestError for an id that is in use."""
        with self._changed:
            if self._state != "ready":
                raise UnavailableError(f"the engine is {self._state}: {self._reason}")
            if request.request_id in self._requests:
                raise RequestError(
                    f"request_id {request.request_id!r} belongs to a request that has not ended yet",
                    param="request_id",
                )
            self._check_room(len(request.prompt_ids))
            self._requests[request.request_id] = request
            self._settled = False
            self._num_arriving += 1
            self._num_arriving_tokens += len(request.prompt_ids)
            self._commands.append(request)
            self._changed.notify_all()

    def _check_room(self, num_tokens: int) -> None:
        config, stats = self._config, self._stats
        # Those who fill a free slot at the next turn don't count as queued.
        num_queued = self._num_arriving + stats.num_waiting
        if num_queued >= config.max_num_queued + self._num_vacant:
            raise QueueFullError(
                f"{num_queued} requests are waiting already, the limit is "
                f"max_num_queued={config.max_num_queued}; try again later",
                retry_after_s=self._time_to_work_off(),
            )
        num_queued_tokens = self._num_arriving_tokens + stats.num_queued_tokens
        if num_queued_tokens and num_queued_tokens + num_tokens > config.max_queued_tokens:
            raise QueueFullError(
                f"{num_queued_tokens} prompt tokens are waiting already, {num_tokens} more would be over "
                f"the limit of max_queued_tokens={config.max_queued_tokens}; try again later",
                code="queue_tokens_full",
                retry_after_s=self._time_to_work_off(),
            )

    def _time_to_work_off(self) -> int:
        """Seconds until those who are here now should be done, by the pace of late; whole, 1 to 300."""
        stats = self._stats
        num_requests = self._num_arriving + stats.num_waiting + stats.num_running
        num_tokens = self._num_arriving_tokens + stats.num_queued_tokens + num_requests * stats.mean_output
        seconds = num_tokens / stats.tokens_per_s if stats.tokens_per_s else SHORTEST_RETRY_S
        return ceil(min(max(seconds, SHORTEST_RETRY_S), LONGEST_RETRY_S))

    def abort(self, request_id: str) -> None:
        """Ask for the end of a request; an id that is unknown or has ended is ignored."""
        with self._changed:
            if request_id in self._requests:
                self._commands.append(Abort(request_id))
                self._changed.notify_all()

    def stats(self) -> EngineStats:
        with self._changed:
            return self._stats._replace(
                num_waiting=self._stats.num_waiting + self._num_arriving,
                num_queued_tokens=self._stats.num_queued_tokens + self._num_arriving_tokens,
                state=self._state,
                reason=self._reason,
            )

    def open(self) -> None:
        """From starting to ready."""
        with self._changed:
            assert self._state == "starting", f"an engine that is {self._state} can't be started"
            self._state, self._reason = "ready", None

    def drain(self, timeout_s: float) -> None:
        """Refuse what comes from now on; the deadline can only move forward."""
        with self._changed:
            deadline_s = time.monotonic() + timeout_s
            if self._state in ("starting", "ready"):
                self._state, self._reason = "draining", "shutting down"
            if self._deadline_s is None or deadline_s < self._deadline_s:
                self._deadline_s = deadline_s
            self._changed.notify_all()

    def wait_settled(self, timeout_s: float) -> bool:
        """Block until everybody has the last event, and tell whether that came about in time."""
        with self._changed:
            return self._changed.wait_for(lambda: self._settled, timeout_s)

    def stop(self) -> None:
        """Let `wait` return False."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    # For the engine thread.

    def wait(self, has_work: Callable[[], bool]) -> bool:
        """Sleep until a command arrives or there is work; False: the thread should end."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._stopping or self._state == "dead" or self._commands or has_work()
            )
            return not self._stopping and self._state != "dead"

    @property
    def is_dead(self) -> bool:
        return self._state == "dead"

    @property
    def has_commands(self) -> bool:
        return bool(self._commands)

    def take(self, now: float) -> tuple[list[Command], bool]:
        """The commands since the last call, and whether the deadline of draining has passed."""
        with self._changed:
            commands, self._commands = self._commands, []
            if self._num_arriving:
                # Until the scheduler reports them they count as waiting: none is missed or counted twice.
                stats = self._stats
                self._stats = stats._replace(
                    num_waiting=stats.num_waiting + self._num_arriving,
                    num_queued_tokens=stats.num_queued_tokens + self._num_arriving_tokens,
                )
                self._num_arriving = self._num_arriving_tokens = 0
            return commands, self._deadline_s is not None and now >= self._deadline_s

    def publish(self, stats: EngineStats, num_vacant: int, ended_ids: Iterable[str]) -> None:
        """Show the figures of this turn and forget the requests that ended in it."""
        with self._changed:
            self._stats = stats
            self._num_vacant = num_vacant
            for request_id in ended_ids:
                self._requests.pop(request_id, None)

    def settle(self) -> None:
        """The events published so far are delivered."""
        with self._changed:
            if not self._requests and not self._settled:
                self._settled = True
                self._changed.notify_all()

    def close(self, reason: str, ended_ids: Iterable[str] = ()) -> list[Request]:
        """To dead, for `reason`. Returns the requests that have not ended, so that they can be told."""
        with self._changed:
            if self._state != "dead":
                self._state, self._reason = "dead", reason
            for request_id in ended_ids:
                self._requests.pop(request_id, None)
            left = list(self._requests.values())
            self._requests.clear()
            self._commands.clear()
            self._num_arriving = self._num_arriving_tokens = 0
            self._stats = self._stats._replace(
                num_running=0, num_waiting=0, num_queued_tokens=0, num_pages_used=0
            )
            self._changed.notify_all()
            return left
