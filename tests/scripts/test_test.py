"""scripts/test and .ci/run: what they run, and that no failure goes unseen."""

import pytest


@pytest.fixture
def ready(sandbox):
    sandbox.python("python3", "3.12.4")
    assert sandbox.run("scripts/setup", "test").returncode == 0
    sandbox.calls()
    return sandbox


def test_it_installs_the_test_extra_and_runs_every_check(sandbox):
    sandbox.python("python3", "3.12.4")
    assert sandbox.run("scripts/test").returncode == 0
    calls = sandbox.calls()
    assert calls[2].endswith(".[test]")
    assert calls[3:] == [
        "ruff check JAX_PLATFORMS=cpu CI=",
        "mypy JAX_PLATFORMS=cpu CI=",
        "pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder JAX_PLATFORMS=cpu CI=",
    ]


def test_arguments_go_to_pytest_alone(ready):
    assert ready.run("scripts/test", "tests/engine", "-k", "a b", JAX_PLATFORMS="tpu").returncode == 0
    assert ready.calls() == ["pytest tests/engine -k a b JAX_PLATFORMS=tpu CI="]


@pytest.mark.parametrize("failing", ["ruff", "mypy", "pytest"])
@pytest.mark.parametrize("command", ["scripts/test", ".ci/run"])
def test_every_check_is_run_and_one_failure_fails_the_whole(ready, command, failing):
    result = ready.run(command, FAILING=failing)
    assert result.returncode == 1
    assert result.stderr.splitlines()[-1] == f"[test] failed: {failing}"
    assert len(ready.calls()) == 3


def test_continuous_integration_reads_nothing_and_ends_with_pytests_closing_line(ready):
    process = ready.start(".ci/run", cwd=ready.root)
    out = process.stdout.read()  # would wait for ever if pytest were given our open stdin
    assert process.wait(timeout=60) == 0
    assert out.splitlines()[-1] == "7 passed in 0.01s"
    assert [call.endswith("CI=true") for call in ready.calls()] == [True] * 3
