"""Imports go one way: read from the sources, so that an import inside of a function counts as well."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import jaxserve

PACKAGE = Path(jaxserve.__file__).parent

# What each part may import of jaxserve: parts by name, or single modules.
FOUNDATION = {"errors", "types"}
ALLOWED = {
    "errors": set(),
    "types": set(),
    "__init__": set(),
    "metrics": {"errors", "types"},
    "native": set(),
    "ops": {"native", "errors"},
    "models": {"ops", "errors", "weights.source"},
    "tokenizer": {"errors"},
    "grammar": {"tokenizer", *FOUNDATION},
    "tools": {"grammar", *FOUNDATION},
    "weights": {"models", "ops.quant", "tokenizer", "errors"},
    "engine": {"tokenizer", *FOUNDATION},
    "parallel": {"errors"},
    "runtime": {"models", "ops", "native", "parallel", "engine.plan", "engine.config", *FOUNDATION},
    "server": {"engine", "tokenizer", "grammar", "tools", "metrics", *FOUNDATION},
    "commands": {"launch", "server", "engine", "tokenizer", "metrics", "weights", *FOUNDATION},
    "cli": {"commands", *FOUNDATION},
    "__main__": {"cli"},
    "launch": {"engine", "tokenizer", "weights", "models", "ops", "runtime", "parallel", *FOUNDATION},
}
NEEDS_NO_JAX = (
    "errors", "types", "metrics", "tokenizer", "grammar", "tools", "engine", "server", "cli", "commands",
)  # fmt: skip
DEVICE_PACKAGES = {"jax", "jaxlib", "flax", "orbax"}


def modules() -> Iterator[tuple[str, Path]]:
    """Dotted names below jaxserve, and their files."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        yield ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts), path


def is_module(name: str) -> bool:
    path = PACKAGE.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").exists()


def imported(source: str, package: str = "") -> Iterator[str]:
    """Every module that `source` imports, by full name. `package` is the importer's, for relative imports."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for alias in node.names:
                inner = f"{base}.{alias.name}"
                local = inner.removeprefix("jaxserve.")
                yield inner if base == "jaxserve" or (inner != local and is_module(local)) else base


def ours(path: Path) -> set[str]:
    """What a file imports of jaxserve, without the package's name."""
    package = ".".join(("jaxserve", *path.relative_to(PACKAGE).parent.parts))
    names = imported(path.read_text(encoding="utf-8"), package)
    return {name.removeprefix("jaxserve.") for name in names if name.startswith("jaxserve.")}


def part(name: str) -> str:
    return name.split(".")[0]


def breaches(importer: str, names: set[str]) -> list[str]:
    own = part(importer)
    may = ALLOWED[own]
    return sorted(
        name
        for name in names
        if part(name) not in {own, *may} and name != "__version__"
        and not any(name == allowed or name.startswith(allowed + ".") for allowed in may)
    )  # fmt: skip


def test_every_part_of_the_package_has_a_rule():
    assert {part(name) for name, _ in modules()} == ALLOWED.keys()


@pytest.mark.parametrize("own", ALLOWED)
def test_a_part_imports_only_what_lies_below_it(own):
    found = {name: breaches(name, ours(path)) for name, path in modules() if part(name) == own}
    assert not {name: wrong for name, wrong in found.items() if wrong}


def test_the_rules_have_no_cycle():
    """Parts in an order in which each imports earlier ones alone; `weights.source` is a leaf of its own."""
    left = {own: {part(name) for name in may if name != "weights.source"} for own, may in ALLOWED.items()}
    while left:
        free = [own for own, may in left.items() if not may & left.keys()]
        assert free, f"a cycle among {sorted(left)}"
        for own in free:
            del left[own]
    assert not ours(PACKAGE / "weights" / "source.py")


def test_only_front_ends_import_launch():
    users = {part(name) for name, path in modules() if "launch" in {part(n) for n in ours(path)}}
    assert users <= {"commands", "cli", "launch"}


@pytest.mark.parametrize("own", NEEDS_NO_JAX)
def test_a_part_above_the_device_imports_no_jax(own):
    for name, path in modules():
        if part(name) == own:
            packages = {part(other) for other in imported(path.read_text(encoding="utf-8"))}
            assert not packages & DEVICE_PACKAGES, name


def test_the_reader_sees_every_way_to_import():
    source = (
        "import jaxserve.launch\n"
        "from jaxserve import native\n"
        "from jaxserve.ops.backend import XLA\n"
        "from jaxserve.runtime import batch as layout\n"
        "if True:\n    from . import state\n"
        "def f():\n    from ..weights import loader\n    from .step import Rows\n"
    )
    assert set(imported(source, "jaxserve.runtime")) == {
        "jaxserve.launch", "jaxserve.native", "jaxserve.ops.backend", "jaxserve.runtime.batch",
        "jaxserve.runtime.state", "jaxserve.weights.loader", "jaxserve.runtime.step",
    }  # fmt: skip
    assert breaches("ops.norm", {"native", "native.ops", "errors", "ops.rope"}) == []
    assert breaches("models.llama", {"weights.source", "weights.loader"}) == ["weights.loader"]
    assert breaches("engine.engine", {"runtime.runner", "types"}) == ["runtime.runner"]
