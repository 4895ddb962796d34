"""scripts/setup: what it installs, when it has nothing to do, and how it recovers."""

import os
import shutil
import signal
import time

import pytest


@pytest.fixture
def python(sandbox):
    return sandbox.python("python3", "3.12.4")


def set_up(sandbox, *extras, **env):
    """Run scripts/setup, and return what it asked of the interpreter."""
    result = sandbox.run("scripts/setup", *extras, **env)
    assert result.returncode == 0, result.stderr
    return sandbox.calls()


def installs(calls):
    return [call.rpartition(" ")[2] for call in calls if "--editable" in call]


def wait_for(condition, timeout_s=20.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def test_the_first_run_makes_an_environment_and_the_second_does_nothing(sandbox, python):
    first = set_up(sandbox)
    assert first[0] == f"venv {sandbox.venv}"
    assert first[1].endswith(" setuptools>=77")  # what pyproject.toml says the build needs
    assert installs(first) == ["."]
    assert set_up(sandbox) == []


def test_kernels_that_could_not_be_built_are_told_of(sandbox, python):
    library = sandbox.root / "jaxserve/native/_kernels.so"
    assert "C++ kernels" in sandbox.run("scripts/setup").stderr
    build = f"case $* in *--editable*) : >'{library}' ;; esac"
    assert "C++ kernels" not in sandbox.run("scripts/setup", "test", PIP=build).stderr


def test_it_works_from_anywhere_and_through_a_link(sandbox, python):
    link = sandbox.home / "set-up"
    link.symlink_to(sandbox.root / "scripts/setup")
    assert installs(set_up(sandbox)) == ["."]
    result = sandbox.run(link, cwd=sandbox.bin)
    assert result.returncode == 0, result.stderr
    assert sandbox.calls() == []


def test_extras_add_up_and_asking_for_fewer_installs_nothing(sandbox, python):
    assert installs(set_up(sandbox, "test")) == [".[test]"]
    assert set_up(sandbox) == []
    assert installs(set_up(sandbox, "tpu", "test")) == [".[test,tpu]"]
    assert set_up(sandbox, "test", "tpu") == []


def test_an_unknown_extra_is_refused_with_the_known_ones(sandbox, python):
    result = sandbox.run("scripts/setup", "test", "rocm")
    assert result.returncode == 1
    assert "'rocm' is not an extra of jaxserve; there are: test tpu cuda" in result.stderr
    assert sandbox.calls() == []


NATIVE = ["jaxserve/native/attention.cc", "jaxserve/native/new/vector.h"]


@pytest.mark.parametrize("changed", ["setup.cfg", "pyproject.toml", "setup.py", *NATIVE])
def test_a_change_of_what_gets_installed_installs_again_with_the_same_extras(sandbox, python, changed):
    set_up(sandbox, "test")
    (sandbox.root / changed).parent.mkdir(exist_ok=True)
    with open(sandbox.root / changed, "a") as file:
        file.write("\n# changed\n")
    calls = set_up(sandbox)
    assert installs(calls) == [".[test]"]
    assert not any(call.startswith("venv") for call in calls)  # in the same environment
    assert set_up(sandbox) == []


def test_the_environment_goes_where_it_is_told_to(sandbox, python):
    elsewhere = sandbox.home / "my env"
    assert set_up(sandbox, JAXSERVE_VENV=str(elsewhere))[0] == f"venv {elsewhere}"
    assert set_up(sandbox, JAXSERVE_VENV="my env") == []  # relative to the caller
    assert not sandbox.venv.exists()


def test_an_environment_whose_interpreter_vanished_is_rebuilt(sandbox, python):
    set_up(sandbox, "test")
    (sandbox.venv / "bin/python").unlink()
    (sandbox.venv / "left-over").touch()
    calls = set_up(sandbox)
    assert calls[0] == f"venv {sandbox.venv}"
    assert installs(calls) == [".[test]"]
    assert not (sandbox.venv / "left-over").exists()


def test_an_environment_that_was_moved_is_rebuilt(sandbox, python):
    set_up(sandbox)
    moved = sandbox.home / "moved"
    shutil.move(sandbox.venv, moved)
    assert set_up(sandbox, JAXSERVE_VENV=str(moved))[0] == f"venv {moved}"


def test_another_python_that_is_asked_for_rebuilds_the_environment(sandbox, python):
    set_up(sandbox)
    newer = sandbox.python("newer", "3.13.1")
    assert set_up(sandbox, PYTHON=str(newer))[0] == f"venv {sandbox.venv}"
    assert set_up(sandbox, PYTHON=str(newer)) == []
    assert set_up(sandbox) == []  # nobody asks for another one now


def test_an_environment_that_somebody_else_made_is_used_as_it_is(sandbox, python):
    sandbox.python(sandbox.venv / "bin/python", "3.13.0")
    (sandbox.venv / "pyvenv.cfg").touch()
    calls = set_up(sandbox)
    assert installs(calls) == ["."]
    assert not any(call.startswith("venv") for call in calls)


def test_a_folder_that_is_no_environment_is_never_deleted(sandbox, python):
    (sandbox.venv / "bin").mkdir(parents=True)
    treasure = sandbox.venv / "thesis.tex"
    treasure.touch()
    result = sandbox.run("scripts/setup")
    assert result.returncode == 1
    assert "is not a virtual environment" in result.stderr
    assert treasure.exists()


def test_a_half_made_environment_is_rebuilt(sandbox, python):
    failed = sandbox.run("scripts/setup", VENV="cp \"$0\" \"$3/bin/python\"; echo 'disk full'; exit 1")
    assert failed.returncode == 1
    assert "making the environment failed: disk full" in failed.stderr
    sandbox.calls()
    calls = set_up(sandbox)
    assert calls[0] == f"venv {sandbox.venv}"
    assert set_up(sandbox) == []


def test_a_failed_install_names_the_last_error_and_is_tried_again(sandbox, python):
    set_up(sandbox, "test")
    failed = sandbox.run(
        "scripts/setup",
        "cuda",
        PIP="echo 'ERROR: No matching distribution found for jax'; echo 'see the manual'; exit 1",
    )
    assert failed.returncode == 1
    assert "installing failed: ERROR: No matching distribution found for jax\n" in failed.stderr
    assert "cannot be reached" not in failed.stderr
    assert "jaxserve-setup.log" in failed.stderr
    sandbox.calls()
    assert installs(set_up(sandbox)) == [".[test]"]  # what failed is not asked for again


def test_an_install_without_network_says_so(sandbox, python):
    lines = [
        "WARNING: Retrying: Failed to establish a new connection: Network is unreachable",
        "    ERROR: No matching distribution found for setuptools",
        "ERROR: Failed to build the package when installing build dependencies",
    ]
    script = "".join(f"echo '{line}'; " for line in lines)
    failed = sandbox.run("scripts/setup", PIP=f"{script} exit 1")
    assert failed.returncode == 1
    assert "installing failed: ERROR: No matching distribution found for setuptools\n" in failed.stderr
    assert "The package index cannot be reached" in failed.stderr


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupted_install_ends_with_one_line_and_is_completed_later(sandbox, python, number, status):
    set_up(sandbox, "test")
    pid_file = sandbox.home / "pid"
    process = sandbox.start("scripts/setup", "cuda", PIP=f"echo $$ >'{pid_file}'; sleep 60; exit 0")
    wait_for(lambda: pid_file.exists() and pid_file.read_text().endswith("\n"))
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    _, err = process.communicate(timeout=20)
    assert process.returncode == status
    assert [line for line in err.splitlines() if "installing" not in line] == [
        "[setup] interrupted; run it again to go on from here"
    ]
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)  # pip is gone too
    sandbox.calls()
    assert installs(set_up(sandbox)) == [".[test]"]
    assert set_up(sandbox) == []


def test_a_package_that_pip_left_half_written_is_installed_anew(sandbox, python):
    packages = sandbox.venv / "lib/python3.12/site-packages"
    half = "packages=${0%/bin/python}/lib/python3.12/site-packages; "
    half += 'mkdir -p "$packages/half-1.dist-info" "$packages/whole-1.dist-info" "$packages/~old"; '
    half += ': >"$packages/whole-1.dist-info/INSTALLER"; exit 1'
    assert sandbox.run("scripts/setup", PIP=half).returncode == 1
    assert (packages / "half-1.dist-info").exists()
    set_up(sandbox)
    assert [path.name for path in packages.iterdir()] == ["whole-1.dist-info"]


def test_two_at_once_install_once(sandbox, python):
    if not (sandbox.bin / "flock").exists():
        pytest.skip("flock is not installed")
    together = [sandbox.start("scripts/setup", PIP="sleep 0.5") for _ in range(2)]
    outputs = [process.communicate(timeout=60)[1] for process in together]
    assert [process.returncode for process in together] == [0, 0], outputs
    assert installs(sandbox.calls()) == ["."]


def test_help_says_what_can_be_asked_for(sandbox):
    result = sandbox.run("scripts/setup", "--help")
    assert result.returncode == 0
    for word in ("test", "tpu", "cuda", "--print-python", "PYTHON", "JAXSERVE_VENV"):
        assert word in result.stdout
