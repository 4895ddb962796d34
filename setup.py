"""Builds the optional C++ kernels; everything else about the package is in setup.cfg.

The library is not a Python module: it is loaded by jaxserve.native.library and called by XLA. Without a
compiler or without jaxlib's headers it is left out, one line says so, and the install goes on.
"""

import importlib.util
import os
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

SOURCES = Path("jaxserve/native/csrc")
KERNELS = Extension(
    "jaxserve.native._kernels",
    sources=[str(path) for path in sorted(SOURCES.glob("*.cc"))],
    depends=[str(path) for path in sorted(SOURCES.glob("*.h"))],
    language="c++",
    # No -march: each source picks its instruction set, and the CPU is asked at run time. Fused
    # multiply-adds are written out, so that every path rounds alike.
    extra_compile_args=[
        *("-std=c++17", "-O3", "-g0", "-ffp-contract=off"),
        *("-fvisibility=hidden", "-pthread", "-w"),
    ],
    extra_link_args=["-pthread"],
    optional=True,
)


class BuildKernels(build_ext):
    """Names the library the same for every Python version, and never fails the install."""

    def get_ext_filename(self, fullname: str) -> str:
        return os.path.join(*fullname.split(".")) + ".so"

    def build_extension(self, ext: Extension) -> None:
        try:
            jaxlib = importlib.util.find_spec("jaxlib")
            if jaxlib is None or jaxlib.origin is None:
                raise RuntimeError("jaxlib, whose headers are needed, is not there")
            ext.include_dirs = [str(Path(jaxlib.origin).parent / "include")]
            super().build_extension(ext)
        except Exception as error:
            print(f"jaxserve: the C++ CPU kernels are not built, XLA's are used instead: {error}", flush=True)


setup(ext_modules=[KERNELS], cmdclass={"build_ext": BuildKernels})
