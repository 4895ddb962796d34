"""scripts/serve: which model is prepared, and what reaches `jaxserve serve`."""

import pytest


@pytest.fixture
def ready(sandbox):
    """A sandbox that is set up, with a fake `jaxserve`."""
    sandbox.python("python3", "3.12.4")
    assert sandbox.run("scripts/setup").returncode == 0
    sandbox.calls()
    return sandbox


def serve(sandbox, *arguments, **options):
    result = sandbox.run("scripts/serve", *arguments, **options)
    assert result.returncode == 0, result.stderr
    return sandbox.calls()


def test_from_nothing_it_sets_up_fetches_converts_and_serves_the_default_model(sandbox):
    sandbox.python("python3", "3.12.4")
    calls = serve(sandbox)
    assert calls[0].startswith("venv ")
    assert calls[2].startswith("pip install ")
    assert calls[3:] == [
        "jaxserve <pull> <smollm2-135m>",
        "jaxserve <convert> <checkpoints/smollm2-135m.gguf> <checkpoints/smollm2-135m>",
        f"jaxserve <serve> <{sandbox.root}/checkpoints/smollm2-135m>",
    ]
    assert serve(sandbox) == calls[-1:]  # again: nothing but serving


def test_a_file_already_fetched_is_only_converted(ready):
    (ready.root / "checkpoints/gemma3-270m.gguf").touch()
    assert serve(ready, "gemma3-270m") == [
        "jaxserve <convert> <checkpoints/gemma3-270m.gguf> <checkpoints/gemma3-270m>",
        f"jaxserve <serve> <{ready.root}/checkpoints/gemma3-270m>",
    ]


def test_flags_pass_through_untouched(ready):
    (ready.root / "checkpoints/smollm2-135m").mkdir()
    flags = ["--port", "9", "--served-model-name", "a b", "", "*"]
    quoted = "".join(f" <{flag}>" for flag in flags)
    model = f"{ready.root}/checkpoints/smollm2-135m"
    assert serve(ready, *flags) == [f"jaxserve <serve> <{model}>{quoted}"]
    assert serve(ready, "smollm2-135m", *flags) == [f"jaxserve <serve> <{model}>{quoted}"]


@pytest.mark.parametrize(
    ("model", "place"), [("org/name", "org--name"), ("org/name:file.gguf", "org--name--file.gguf")]
)
def test_a_model_of_the_hub_is_fetched_once_and_served_unconverted(ready, model, place):
    served = f"jaxserve <serve> <{ready.root}/checkpoints/{place}>"
    assert serve(ready, model) == [f"jaxserve <pull> <{model}>", served]
    assert serve(ready, model) == [served]


@pytest.mark.parametrize("model", ["./local.gguf", "../local", "/models/folder", "~/folder", "here", "a/b/c"])
def test_paths_are_served_as_they_are_from_the_callers_folder(ready, model):
    (ready.home / "here").mkdir()
    result = ready.run("scripts/serve", model, "--port", "9", cwd=ready.home)
    assert f"in {ready.home}\n" in result.stdout
    assert ready.calls() == [f"jaxserve <serve> <{model}> <--port> <9>"]


def test_a_model_that_cannot_be_fetched_is_not_served(ready):
    result = ready.run("scripts/serve", "unknown")
    assert result.returncode == 2
    assert "no such model: unknown" in result.stderr
    assert ready.calls() == ["jaxserve <pull> <unknown>"]


@pytest.mark.parametrize("arguments", [["--help"], ["smollm2-135m", "-h"]])
def test_help_fetches_no_model(ready, arguments):
    assert serve(ready, *arguments) == ["jaxserve <serve> <--help>"]


def test_the_server_takes_the_place_of_the_script_so_that_signals_reach_it(ready):
    (ready.root / "checkpoints/smollm2-135m").mkdir()
    process = ready.start("scripts/serve")
    out, _ = process.communicate(timeout=60)
    assert f"pid {process.pid} " in out


def test_two_at_once_prepare_the_model_once(ready):
    if not (ready.bin / "flock").exists():
        pytest.skip("flock is not installed")
    together = [ready.start("scripts/serve") for _ in range(2)]
    for process in together:
        process.communicate(timeout=60)
    assert sorted(call.split()[1] for call in ready.calls()) == ["<convert>", "<pull>", "<serve>", "<serve>"]
