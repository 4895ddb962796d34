"""A clone of the scripts in a temporary folder, with fake interpreters; no network and no real install."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]

# All that the scripts may rely on, so that no interpreter of this machine is ever found.
TOOLS = ["bash", "cat", "cksum", "cp", "dirname", "env", "flock", "grep", "ls", "mkdir", "mv", "readlink"]
TOOLS += ["rm", "sed", "sleep", "sort", "tail"]

# Answers the version query, makes "environments" that hold a copy of itself, and plays pip, ruff, mypy and
# pytest: each notes its arguments in $CALLS. $PIP is shell code that runs in place of a successful install.
FAKE_PYTHON = """#!/bin/sh
home='{executable}'
case "$1 $2" in
"-I -S") case $4 in *tomllib*) echo 'setuptools>=77' ;; *) echo '{version}' ;; esac ;;
"-c "*) echo '{version}|{problem}|{executable}' ;;
"-m venv")
    echo "venv $3" >>"$CALLS"
    mkdir -p "$3/bin"
    : >"$3/pyvenv.cfg"
    eval "${{VENV:-}}"
    cp "$0" "$3/bin/python" ;;
"-m pip")
    [ "$3" = --version ] && exit 0
    shift 2
    echo "pip $*" >>"$CALLS"
    eval "${{PIP:-}}"
    cp "$FAKE_JAXSERVE" "${{0%/*}}/jaxserve" ;;
"-m "*)
    shift
    echo "$* JAX_PLATFORMS=$JAX_PLATFORMS CI=${{CI:-}}" >>"$CALLS"
    eval "case $1 in ${{FAILING:-none}}) exit 3 ;; esac"
    if [ "$1" = pytest ]; then cat; echo "7 passed in 0.01s"; fi ;;
*) exit 9 ;;
esac
"""

FAKE_JAXSERVE = """#!/bin/sh
printf 'jaxserve' >>"$CALLS"
for argument in "$@"; do printf ' <%s>' "$argument" >>"$CALLS"; done
echo >>"$CALLS"
case $1 in
pull) [ "$2" != unknown ] || { echo "no such model: unknown" >&2; exit 2; }
    case $2 in
    org/name) mkdir checkpoints/org--name ;;
    org/name:*) : >"checkpoints/org--name--${2#*:}" ;;
    *) : >"checkpoints/$2.gguf" ;;
    esac ;;
convert) mkdir "$3" ;;
serve) echo "pid $$ in $PWD" ;;
esac
"""


class Sandbox:
    """A clone at `root`, a PATH that holds only `bin`, and an empty home folder."""

    def __init__(self, folder: Path):
        self.root = folder / "a clone"  # with a space, as people have them
        self.bin = folder / "bin"
        self.home = folder / "home"
        self.calls_file = folder / "calls"
        self.venv = self.root / ".venv"
        for made in (self.bin, self.home, self.root / "jaxserve/native", self.root / "checkpoints"):
            made.mkdir(parents=True)
        for name in ("scripts", ".ci"):
            shutil.copytree(REPOSITORY / name, self.root / name)
        (self.root / "setup.cfg").write_text("[metadata]\nname = jaxserve\n")
        (self.root / "pyproject.toml").write_text("")
        (self.root / "jaxserve/native/attention.cc").write_text("int main() {}\n")
        for tool in TOOLS:
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)
        self.fake_jaxserve = self.script(folder / "jaxserve", FAKE_JAXSERVE)
        self.processes: list[subprocess.Popen[str]] = []

    def script(self, path: Path, text: str) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
        return path

    def python(self, path: Path | str, version: str, problem: str = "") -> Path:
        """A fake interpreter; a relative `path` is taken from the PATH's folder."""
        path = self.bin / path
        return self.script(path, FAKE_PYTHON.format(version=version, problem=problem, executable=path))

    def environment(self, **more: str) -> dict[str, str]:
        """The environment that the scripts run in, and nothing of the machine's own."""
        return {
            "PATH": str(self.bin),
            "HOME": str(self.home),
            "CALLS": str(self.calls_file),
            "FAKE_JAXSERVE": str(self.fake_jaxserve),
            **more,
        }

    def start(self, *command: str | Path, cwd: Path | None = None, **env: str) -> "subprocess.Popen[str]":
        process = subprocess.Popen(
            [str(self.root / command[0]), *map(str, command[1:])],
            cwd=cwd or self.home,
            env=self.environment(**env),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.processes.append(process)
        return process

    def run(
        self, *command: str | Path, cwd: Path | None = None, **env: str
    ) -> "subprocess.CompletedProcess[str]":
        process = self.start(*command, cwd=cwd, **env)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def calls(self) -> list[str]:
        """What the fake programs were asked to do since the last look, in order."""
        if not self.calls_file.exists():
            return []
        lines = self.calls_file.read_text().splitlines()
        self.calls_file.unlink()
        return lines


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Sandbox]:
    made = Sandbox(tmp_path)
    yield made
    for process in made.processes:
        if process.poll() is None:
            os.killpg(process.pid, 9)
            process.wait()
