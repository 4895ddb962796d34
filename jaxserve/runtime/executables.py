"""Compiled programs on the disk, so that the next start neither traces nor compiles them.

JAX's own persistent cache is keyed by the lowered program, so it saves XLA's time but not that of tracing
and lowering (0.2 s a program, 32 programs). This one is keyed by everything those programs are made from.

The two must not be mixed: a program that JAX read from its cache on CPU can't be serialised again (it loads
and then fails with "Function ... not found"), so `without_jax_cache` is around every compilation kept here.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import pickle
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
import jaxlib
from jax.experimental import serialize_executable
from jax.experimental.compilation_cache import compilation_cache

import jaxserve

log = logging.getLogger(__name__)

KEPT = 8  # sets of programs that stay on the disk: the latest used
PACKAGE = Path(jaxserve.__file__).parent
ENVIRONMENT = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")  # variables that change what is compiled
CONFIG = (  # settings of JAX that change what is traced
    "jax_default_matmul_precision",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_threefry_partitionable",
)
SOURCES = ("models", "ops", "runtime", "native", "engine")  # what programs are traced from


def fingerprint(*parts: Any) -> str:
    """A hash of `parts`, which describe the programs, of jaxserve's code, and of JAX, XLA and the device."""
    device = jax.devices()[0]
    digest = hashlib.sha256()
    for part in (
        *parts, jax.__version__, jaxlib.__version__, device.client.platform_version, device.device_kind,
        jax.device_count(), _cpu_flags(), *(os.environ.get(name, "") for name in ENVIRONMENT),
        json.dumps({name: str(jax.config.values.get(name)) for name in CONFIG}),
    ):  # fmt: skip
        digest.update(repr(part).encode() + b"\0")
    for path in _source_files():
        digest.update(str(path.relative_to(PACKAGE)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:32]


def _source_files() -> Iterable[Path]:
    for folder in SOURCES:
        files = (PACKAGE / folder).rglob("*")
        yield from sorted(path for path in files if path.suffix in (".py", ".so") and path.is_file())


def _cpu_flags() -> str:
    """The host CPU's instruction sets: code compiled for one CPU must not run on a lesser one."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")


@contextmanager
def without_jax_cache() -> Iterator[None]:
    """Compile for real inside, whatever cache the process or its environment has set up."""
    before = jax.config.jax_enable_compilation_cache
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()  # it remembers whether it is in use
    try:
        yield
    finally:
        jax.config.update("jax_enable_compilation_cache", before)
        compilation_cache.reset_cache()


class Executables:
    """The programs of one fingerprint below `folder`. Without a folder it neither finds nor keeps any.

    An entry that can't be read is as good as none: it is compiled and written again.
    """

    def __init__(self, folder: Path | None, name: str):
        self._folder = None if folder is None else folder / "programs" / name

    def load(self, key: tuple[str, int, int], in_tree: Any, out_tree: Any) -> Any | None:
        """The compiled program, or None."""
        if self._folder is None:
            return None
        path = self._path(key)
        try:
            payload = path.read_bytes()
        except OSError:
            return None
        try:
            return serialize_executable.deserialize_and_load(payload, in_tree, out_tree)
        except Exception as error:  # truncated, or of a JAX that packs differently
            log.warning("%s can't be used and is compiled again: %s", path, error)
            return None

    def save(self, key: tuple[str, int, int], compiled: Any) -> None:
        """Keep `compiled`. A disk that is full or read-only costs the next start its time, nothing else."""
        if self._folder is None:
            return
        path = self._path(key)
        temporary = path.with_suffix(f".{os.getpid()}.partial")
        try:
            payload, _, _ = serialize_executable.serialize(compiled)
            self._folder.mkdir(parents=True, exist_ok=True)
            temporary.write_bytes(payload)
            temporary.replace(path)
        except (OSError, ValueError, pickle.PicklingError) as error:
            log.warning("%s is not kept: %s", path, error)
            with suppress(OSError):
                temporary.unlink(missing_ok=True)

    def clear(self) -> None:
        """Forget this set."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def prune(self) -> None:
        """Mark this set as used now, and drop all but the KEPT latest."""
        if self._folder is None or not self._folder.is_dir():
            return
        try:
            os.utime(self._folder)
            sets = sorted(self._folder.parent.iterdir(), key=lambda path: path.stat().st_mtime)
            for old in sets[:-KEPT]:
                shutil.rmtree(old, ignore_errors=True)
        except OSError as error:
            log.info("%s is not pruned: %s", self._folder.parent, error)

    def _path(self, key: tuple[str, int, int]) -> Path:
        assert self._folder is not None
        return self._folder / "-".join(map(str, key))
