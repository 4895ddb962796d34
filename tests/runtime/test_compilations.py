from __future__ import annotations

import jax
import numpy as np

from jaxserve.runtime.compilations import CompilationCounter


def compile_one(n: int) -> None:
    jax.jit(lambda x: x * n).lower(np.ones(3, np.float32)).compile()


def test_every_compilation_since_its_construction_counts():
    compile_one(1)
    counter = CompilationCounter()
    assert counter.count == 0
    compile_one(2)
    compile_one(3)
    assert counter.count == 2
    counter.close()
    compile_one(4)
    assert counter.count == 2


def test_calling_what_is_compiled_counts_nothing():
    double = jax.jit(lambda x: x + x).lower(np.ones(3, np.float32)).compile()
    counter = CompilationCounter()
    for _ in range(3):
        double(np.ones(3, np.float32))
    assert counter.count == 0
    counter.close()
