"""Which interpreter scripts/setup takes, and what it says when there is none."""

import importlib.util
import subprocess
import sys

import pytest

FAKE_UV = """#!/bin/sh
case "$2" in
find) [ -e "$HOME/uv-python" ] && echo "$HOME/uv-python" ;;
install) [ -e "$HOME/offered" ] || { echo "resolving"; echo "error: no route to host"; exit 2; }
    mv "$HOME/offered" "$HOME/uv-python" ;;
esac
"""


def chosen(sandbox, **env):
    result = sandbox.run("scripts/setup", "--print-python", **env)
    assert result.returncode == 0, result.stderr
    return result.stdout.strip()


def refusal(sandbox, *arguments, **env):
    result = sandbox.run("scripts/setup", *arguments, **env)
    assert result.returncode != 0
    assert result.stdout == ""
    assert not sandbox.venv.exists()
    return result.stderr


def test_interpreters_are_taken_in_the_documented_order(sandbox):
    own = sandbox.python(sandbox.home / "own-python", "3.12.0")
    in_order = [
        sandbox.python("python3", "3.13.2"),
        sandbox.python("python3.14", "3.14.0"),
        sandbox.python("python3.13", "3.13.0"),
        sandbox.python("python3.12", "3.12.0"),
        sandbox.python(sandbox.home / ".pyenv/versions/3.12.9/bin/python", "3.12.9"),
        sandbox.python(sandbox.home / ".pyenv/versions/3.12.10/bin/python", "3.12.10"),
        sandbox.python(sandbox.home / "uv-python", "3.12.5"),
    ]
    sandbox.python(sandbox.home / ".pyenv/versions/3.11.9/bin/python", "3.11.9")
    sandbox.script(sandbox.bin / "uv", FAKE_UV)
    assert chosen(sandbox, PYTHON=str(own)) == str(own)
    for expected in in_order:
        assert chosen(sandbox) == str(expected)
        expected.unlink()


def test_uv_fetches_an_interpreter_when_there_is_no_other(sandbox):
    sandbox.script(sandbox.home / ".local/bin/uv", FAKE_UV)  # where its installer puts it
    offered = sandbox.python(sandbox.home / "offered", "3.12.5")
    assert chosen(sandbox) == str(offered)


def test_a_pyenv_elsewhere_is_found_by_pyenv_root(sandbox):
    python = sandbox.python(sandbox.home / "else where/versions/3.13.1/bin/python", "3.13.1")
    assert chosen(sandbox, PYENV_ROOT=str(sandbox.home / "else where")) == str(python)


def test_a_shim_with_nothing_behind_it_hides_no_interpreter(sandbox):
    sandbox.script(sandbox.bin / "python3", "#!/bin/sh\necho 'pyenv: not installed' >&2\nexit 127\n")
    real = sandbox.python(sandbox.home / "bin/python3", "3.12.3")
    assert chosen(sandbox, PATH=f"{sandbox.bin}:{sandbox.home}/bin") == str(real)


def test_an_interpreter_too_old_or_unable_is_passed_over(sandbox):
    sandbox.python("python3", "3.11.9")
    sandbox.python("python3.14", "3.14.0", problem="is a free-threaded build")
    sandbox.python("python3.13", "3.13.0", problem="cannot make virtual environments")
    good = sandbox.python("python3.12", "3.12.0")
    assert chosen(sandbox, PYTHON="") == str(good)


def test_python_may_be_a_name_or_a_path_relative_to_the_caller(sandbox):
    python = sandbox.python(sandbox.home / "mine/python", "4.0.0")
    sandbox.python("python3", "3.12.0")
    named = sandbox.python("special-python", "3.12.7")
    assert chosen(sandbox, PYTHON="mine/python", cwd=sandbox.home) == str(python)
    assert chosen(sandbox, PYTHON="special-python") == str(named)


@pytest.mark.parametrize(
    ("version", "problem", "expected"),
    [
        ("3.11.2", "", "(Python 3.11.2) is too old"),
        ("2.7.18", "", "(Python 2.7.18) is too old"),
        ("3.13.0", "is pypy; jax needs CPython", "(Python 3.13.0) is pypy"),
        ("3.12.4", "cannot make virtual environments", "sudo apt-get install python3.12-venv"),
        ("nonsense", "", "does not run"),
    ],
)
def test_an_unusable_python_that_was_asked_for_stops_the_setup(sandbox, version, problem, expected):
    sandbox.python("python3", "3.13.0")  # is there, but was not asked for
    asked = sandbox.python(sandbox.home / "asked", version, problem)
    message = refusal(sandbox, PYTHON=str(asked))
    assert expected in message
    assert f"PYTHON={asked}" in message
    assert "Unset PYTHON" in message


def test_a_python_that_does_not_exist_stops_the_setup(sandbox):
    sandbox.python("python3", "3.13.0")
    message = refusal(sandbox, PYTHON="python9")
    assert "PYTHON=python9 was asked for, but there is no such program" in message


def test_no_interpreter_at_all_says_what_was_tried_and_what_to_do(sandbox):
    sandbox.python("python3", "3.10.1")
    sandbox.script(sandbox.bin / "uv", FAKE_UV)
    message = refusal(sandbox)
    assert "Python 3.12 or newer" in message
    assert f"{sandbox.bin}/python3 (Python 3.10.1) is too old" in message
    assert "uv could not fetch Python 3.12: error: no route to host" in message
    assert "PYTHON=/path/to/python3.12 scripts/setup" in message
    assert "apt-get" not in message  # nothing here lacks only that package


def test_a_debian_interpreter_without_venv_names_the_package(sandbox):
    sandbox.python("python3", "3.13.5", problem="cannot make virtual environments")
    message = refusal(sandbox)
    assert "sudo apt-get install python3.13-venv" in message
    assert "uv is not installed" in message


def version_query(sandbox):
    script = 'source "$1"; printf %s "$PROBE"'
    command = ["bash", "-c", script, "bash", str(sandbox.root / "scripts/setup")]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def answer(query):
    command = [sys.executable, "-c", query]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().split("|")


def test_the_version_query_answers_with_the_interpreter_behind_the_environment(sandbox):
    if importlib.util.find_spec("ensurepip") is None:
        pytest.skip("this interpreter cannot make virtual environments")
    version, problem, executable = answer(version_query(sandbox))
    assert version == ".".join(map(str, sys.version_info[:3]))
    assert problem == ""
    prefix = [executable, "-c", "import sys; print(sys.prefix)"]
    assert subprocess.run(prefix, capture_output=True, text=True).stdout.strip() == sys.base_prefix


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("sys.modules['ensurepip'] = None", "cannot make virtual environments"),
        ("sys.implementation.name = 'pypy'", "is pypy; jax needs CPython"),
        ("sys.abiflags = 't'", "is a free-threaded build, which some dependencies do not support"),
        ("sys.version_info = (3, 11, 9, 'final', 0)", ""),  # too old is for the caller to judge
    ],
)
def test_the_version_query_names_what_an_interpreter_lacks(sandbox, change, problem):
    assert answer(f"import sys; {change}\n{version_query(sandbox)}")[1] == problem
