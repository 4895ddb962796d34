"""How much memory the KV pool gets, and how many pages that is."""

from __future__ import annotations

from pathlib import Path

import jax
import psutil

from jaxserve.engine.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.types import MemoryUse

GIB = 1 << 30
CPU_SHARE, CPU_CEILING = 0.25, 2 * GIB  # of what is free; other programs live on the same memory
DEVICE_SHARE = 0.9  # of an accelerator's memory, weights included; the rest is for temporary buffers


def default_kv_budget(reserved: int = 0) -> int:
    """Bytes for the KV pool when nobody says how many. Call it once the weights are loaded.

    `reserved` bytes are left for what else is made on the device and lives as long as the pool.
    """
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return max(0, int(stats["bytes_limit"] * DEVICE_SHARE) - stats["bytes_in_use"] - reserved)
    return min(max(0, int((available_host_bytes() - reserved) * CPU_SHARE)), CPU_CEILING)


def available_bytes() -> int:
    """Free memory of the device, or of the host where that is the device."""
    device = jax.devices()[0]
    stats = device.memory_stats() if device.platform != "cpu" else None
    if stats and "bytes_limit" in stats:
        return max(0, stats["bytes_limit"] - stats["bytes_in_use"])
    return available_host_bytes()


def require_room(num_bytes: int, what: str, remedy: str) -> None:
    """Raise ConfigError with the figures unless `num_bytes` are free for `what`."""
    if num_bytes > (free := available_bytes()):
        raise ConfigError(f"{what}: {num_bytes} bytes are needed, {free} are free; {remedy}")


def memory_use(weights_bytes: int, bytes_per_token: int, config: EngineConfig) -> MemoryUse:
    """What a model takes with its pool; the trash page counts as memory, not as room."""
    usable = config.num_pages - 1
    return MemoryUse(
        weights_bytes=weights_bytes,
        kv_bytes=config.num_pages * config.page_size * bytes_per_token,
        kv_bytes_per_token=bytes_per_token,
        kv_tokens=usable * config.page_size,
        max_model_len=config.max_model_len,
        num_full_requests=usable // config.most_pages,
    )


def available_host_bytes() -> int:
    """Free host memory, a container's limit included."""
    available = psutil.virtual_memory().available
    try:
        limit = int(Path("/sys/fs/cgroup/memory.max").read_text())
        used = int(Path("/sys/fs/cgroup/memory.current").read_text())
    except (OSError, ValueError):  # no cgroup, or "max"
        return available
    return min(available, max(0, limit - used))


def fit_pool(
    *, budget: int, bytes_per_token: int, page_size: int, max_num_seqs: int, max_model_len: int | None,
    max_position: int, most_pages: int | None = None,
) -> tuple[int, int]:  # fmt: skip
    """(num_pages, max_model_len) for a pool of at most `budget` bytes, trash page included.

    The pool is no larger than all slots can fill. Without `max_model_len` it is the model's own limit, or
    less where the pool holds less. `most_pages` are enough for a sequence of any length; None: there is no
    such number. Raises ConfigError with the figures when a wanted length does not fit.
    """
    for flag, value in (
        ("block_size", page_size), ("max_num_seqs", max_num_seqs), ("max_model_len", max_model_len),
    ):  # fmt: skip
        if value is not None and value < 1:
            raise ConfigError(f"{flag}={value} must be a whole number of at least 1")
    if max_model_len is not None and max_model_len > max_position:
        raise ConfigError(
            f"max_model_len={max_model_len} is over the {max_position} positions the model was trained for"
        )
    affordable = budget // (bytes_per_token * page_size)
    if affordable < 2:
        raise ConfigError(
            f"kv_cache_memory={budget} bytes holds {affordable} pages of {page_size} tokens at "
            f"{bytes_per_token} bytes a token, and at least 2 are needed: raise kv_cache_memory"
        )
    wanted = max_model_len or max_position
    if wanted > (affordable - 1) * page_size and (most_pages is None or most_pages > affordable - 1):
        if max_model_len is not None:
            pages = min(-(-wanted // page_size), most_pages or wanted)
            need = (pages + 1) * page_size * bytes_per_token
            raise ConfigError(
                f"max_model_len={wanted} needs {need} bytes of KV cache, kv_cache_memory is {budget}: "
                f"raise kv_cache_memory or lower max_model_len to at most {(affordable - 1) * page_size}"
            )
        wanted = (affordable - 1) * page_size
    useful = max_num_seqs * -(-wanted // page_size) + 1
    return min(affordable, useful), wanted
