from __future__ import annotations

import pkgutil
import subprocess
import sys

import jaxserve.engine


def test_the_engine_imports_with_jax_absent():
    modules = [f"jaxserve.engine.{module.name}" for module in pkgutil.iter_modules(jaxserve.engine.__path__)]
    assert "jaxserve.engine.scheduler" in modules
    code = (
        "import sys\n"
        "for name in ('jax', 'jaxlib', 'flax', 'orbax'):\n"
        "    sys.modules[name] = None\n"
        "import importlib\n"
        f"for name in {modules!r}:\n"
        "    importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
