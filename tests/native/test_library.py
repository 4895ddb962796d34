"""Loading: every reason for which the kernels can't be used is told, and none of them breaks JAX."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve import native
from jaxserve.native import library, selftest

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch):
    """Lets the test load anew, and forgets what it loaded and chose."""
    native.available.cache_clear()
    library.load.cache_clear()
    yield monkeypatch
    monkeypatch.undo()
    native.available.cache_clear()
    library.load.cache_clear()
    native.available()  # chooses the fastest kernels again


def test_a_package_without_the_library_is_unavailable_and_says_how_to_get_it(fresh, tmp_path):
    fresh.setattr(library, "PATH", tmp_path / "_kernels.so")
    usable, reason = native.available()
    assert not usable
    assert "_kernels.so is not there" in reason
    assert "compiler" in reason
    with pytest.raises(native.NativeUnavailable, match="not there"):
        native.linear(jnp.ones((1, 8)), jnp.ones((4, 8)))


@pytest.mark.parametrize("content", [b"", b"not a library", b"\x7fELF"])
def test_a_damaged_library_is_unavailable(fresh, tmp_path, content):
    damaged = tmp_path / "_kernels.so"
    damaged.write_bytes(content)
    fresh.setattr(library, "PATH", damaged)
    usable, reason = native.available()
    assert not usable
    assert "can't be loaded" in reason


@pytest.mark.parametrize(
    ("built", "runs", "accepted"),
    [
        ((0, 4), (0, 4), True),
        ((0, 4), (0, 5), True),
        ((0, 5), (0, 4), False),
        ((1, 0), (0, 9), False),
        ((0, 4), (1, 0), False),
    ],
)
def test_a_library_built_for_a_newer_ffi_is_refused(built, runs, accepted):
    if accepted:
        library.check_version(built, runs)
    else:
        with pytest.raises(native.NativeUnavailable, match=r"built for XLA FFI \d\.\d.*reinstall jaxserve"):
            library.check_version(built, runs)


def test_a_library_newer_than_jaxlib_is_unavailable_before_it_is_registered(built, fresh):
    fresh.setattr(library, "jaxlib_version", lambda: (0, 0))
    registered = []
    fresh.setattr(library.ffi, "register_ffi_target", lambda *args, **kwargs: registered.append(args))
    usable, reason = native.available()
    assert not usable
    assert "the installed jaxlib has 0.0" in reason
    assert not registered


def test_a_library_that_jaxlib_refuses_is_unavailable(built, fresh):
    def refuse(*args, **kwargs):
        raise RuntimeError("version mismatch")

    fresh.setattr(library.ffi, "register_ffi_target", refuse)
    assert native.available() == (
        False,
        "jaxlib refuses jaxserve_gate of _kernels.so: version mismatch",
    )


def test_kernels_that_compute_something_else_are_refused(built, fresh):
    def wrong(x, w, layer=None, *, out_dtype=None):
        return native.linear(x, w, layer, out_dtype=out_dtype) * 1.001

    fresh.setattr(selftest, "linear", wrong)
    usable, reason = native.available()
    assert not usable
    for isa in library.load().isas():
        assert f"those for {isa} are refused: the C++ linear with 1 rows of bfloat16 is off by" in reason


def test_the_next_instruction_set_takes_over_from_one_whose_kernels_are_refused(built, fresh):
    first, *rest = library.load().isas()
    if not rest:
        pytest.skip("this CPU runs one set of kernels only")

    def wrong(x, w, layer=None, *, out_dtype=None):
        right = native.linear(x, w, layer, out_dtype=out_dtype)
        return right * 1.001 if library.load().isa() == first else right

    fresh.setattr(selftest, "linear", wrong)
    usable, reason = native.available()
    assert usable
    assert reason.startswith(f"C++ kernels for {rest[0]}; those for {first} are refused: the C++ linear")
    assert library.load().isa() == rest[0]


def test_the_installed_jaxlib_has_an_ffi_version():
    assert library.jaxlib_version() >= (0, 4)


def test_the_cpu_backend_works_after_loading(built):
    assert native.available()[0]
    assert float(jax.jit(lambda x: x + 1)(jnp.float32(1))) == 2.0


def test_an_unknown_instruction_set_is_refused(built):
    with pytest.raises(native.NativeUnavailable, match="no kernels for 'avx9'"):
        library.load().use_isa("avx9")


def test_the_self_test_runs_while_another_function_is_traced(built):
    @jax.jit
    def traced(x: jax.Array) -> jax.Array:
        native.self_test()
        return native.linear(x, jnp.ones((3, 8)))

    assert traced(jnp.ones((2, 8))).tolist() == [[8.0] * 3] * 2


@pytest.mark.skipif(not (REPOSITORY / "setup.py").exists(), reason="not run from a source tree")
def test_an_install_without_a_compiler_leaves_the_kernels_out_and_goes_on(tmp_path):
    pytest.importorskip("setuptools")
    no_tools = dict.fromkeys(("CC", "CXX", "LDSHARED", "LDCXXSHARED"), "/nonexistent/tool")
    built = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "-b", str(tmp_path), "-t", str(tmp_path / "temp")],
        cwd=REPOSITORY,
        env={**os.environ, **no_tools},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert "jaxserve: the C++ CPU kernels are not built, XLA's are used instead:" in built.stdout
    assert not list(tmp_path.rglob(f"*{sysconfig.get_config_var('SHLIB_SUFFIX') or '.so'}"))


def test_zeros_are_zeros_of_any_shape_and_dtype(built):
    for shape, dtype in [((3, 700, 1024), jnp.float32), ((2, 5), jnp.bfloat16), ((0, 4), jnp.int32)]:
        made = native.zeros(shape, dtype)
        assert (made.shape, made.dtype) == (shape, dtype)
        assert not np.asarray(made, np.float32).any()
