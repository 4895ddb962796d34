"""docs/api.md against the request models: every field has its row, and every row a test that exists."""

from __future__ import annotations

import importlib
import pkgutil
import re
from functools import cache
from pathlib import Path

import pytest

from jaxserve.server import schema
from jaxserve.server.schema.body import Body

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "api.md"
_MARK = re.compile(r"<!-- (fields of|refused by) ([A-Za-z_ ]+) -->")
_ROW = re.compile(r"^\| (`[^|]*`) \|", re.MULTILINE)
_NAME = re.compile(r"`([^`]+)`")


def modules() -> list[object]:
    names = [info.name for info in pkgutil.iter_modules(schema.__path__)]
    return [importlib.import_module(f"{schema.__name__}.{name}") for name in names]


def models() -> dict[str, type[Body]]:
    """Every request model, by name."""
    modules()
    found: dict[str, type[Body]] = {}
    todo = list(Body.__subclasses__())
    while todo:
        model = todo.pop()
        if model.__module__.startswith("jaxserve."):
            found[model.__name__] = model
        todo += model.__subclasses__()
    return found


def refused_tables() -> dict[str, dict[str, object]]:
    return {
        name: value
        for module in modules()
        for name, value in vars(module).items()
        if name.startswith("REFUSED")
    }


def own_fields(model: type[Body]) -> set[str]:
    """The fields that the model itself declares, as they stand in JSON."""
    return {
        field.alias or name for name, field in model.model_fields.items() if name in model.__annotations__
    }


@cache
def tables() -> dict[str, str]:
    """The text below each mark, up to the next one or the next heading."""
    page = PAGE.read_text(encoding="utf-8")
    found = {}
    for match in _MARK.finditer(page):
        rest = page[match.end() :]
        end = re.search(r"^#|<!-- (?:fields|refused)", rest, re.MULTILINE)
        found[match[0].removeprefix("<!-- ").removesuffix(" -->")] = rest[: end.start() if end else None]
    return found


def listed(kind: str, name: str) -> set[str]:
    """Names in the first column of the tables of a model or a refused table."""
    texts = [
        text for mark, text in tables().items() if mark.startswith(kind) and name in mark.split(" ")[2:]
    ]
    assert texts, f"docs/api.md has no table '{kind} {name}'"
    return {field for text in texts for cell in _ROW.findall(text) for field in _NAME.findall(cell)}


@pytest.mark.parametrize("name", sorted(models()))
def test_every_field_of_a_request_model_has_its_row(name):
    fields = own_fields(models()[name])
    assert fields <= listed("fields of", name), "fields without a row in docs/api.md"


def test_every_row_is_a_field():
    known = models()
    for mark in tables():
        kind, names = mark.split(" ")[:2], mark.split(" ")[2:]
        for name in names:
            assert name in (known if kind == ["fields", "of"] else refused_tables()), f"{name} is not there"
        rows = {
            field for cell in _ROW.findall(tables()[mark]) for field in _NAME.findall(cell)
        }
        if kind == ["fields", "of"]:
            assert rows == set().union(*(own_fields(known[name]) for name in names)), mark
        else:
            assert rows <= set().union(*(refused_tables()[name] for name in names)), mark


@pytest.mark.parametrize("name", sorted(refused_tables()))
def test_every_refused_field_has_its_row(name):
    rows = set()
    for mark, text in tables().items():
        if mark.startswith("refused by"):
            rows |= {field for cell in _ROW.findall(text) for field in _NAME.findall(cell)}
    assert set(refused_tables()[name]) <= rows


def test_every_row_names_a_test_that_exists():
    tests = set()
    for path in (ROOT / "tests").rglob("test_*.py"):
        tests |= set(re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text(encoding="utf-8"), re.M))
    for mark, text in tables().items():
        for line in text.splitlines():
            if not _ROW.match(line):
                continue
            named = re.findall(r"`(test_\w+)`", line.split("|")[-2])
            assert named, f"{mark}: no test in the last column of {line}"
            assert set(named) <= tests, f"{mark}: no such test: {set(named) - tests}"
