"""docs/models.md and docs/adding-a-model.md against the registry and the tests that they name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jaxserve.models.registry import FAMILIES
from jaxserve.tokenizer import pretokenizers
from tests.models import test_family_figures, test_gguf_families

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "models.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in PAGE.partition("| family |")[2].partition("\n\n")[0].splitlines()[2:]
]


def cases(column: int) -> set[str]:
    """What stands in backticks in a column, but for the name that GGUF has for a family."""
    cells = [row[column].partition(", as ")[0] for row in ROWS]
    return {name for cell in cells for name in re.findall(r"`([^`]+)`", cell)}


def test_the_table_has_a_row_for_every_family_and_no_other():
    assert [row[0] for row in ROWS] == [family.name for family in FAMILIES]


def test_the_table_names_every_case_of_the_tests_and_no_other():
    assert cases(1) == set(test_family_figures.CASES)
    assert cases(2) == set(test_gguf_families.CASES)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_every_cell_is_tested_or_refused(row):
    family = next(family for family in FAMILIES if family.name == row[0])
    called_llama = {"mistral", "mixtral"}
    assert (row[2] == "refused") == (not family.gguf_architectures and row[0] not in called_llama)
    assert (", as `llama`" in row[2]) == (row[0] in called_llama)
    assert row[3] == "tested"
    assert row[0] in test_gguf_families.BY_FAMILY


def test_the_pre_tokenizers_of_the_page_are_those_supported():
    told = re.search(r"`tokenizer\.ggml\.pre` says:(.*?)\. Any other", PAGE, re.DOTALL)
    assert told is not None
    assert set(re.findall(r"`([^`]+)`", told[1])) == set(pretokenizers._BY_NAME)


def test_the_example_of_a_new_family_is_the_file_as_it_is():
    page = (ROOT / "docs" / "adding-a-model.md").read_text()
    assert f"```python\n{(ROOT / 'jaxserve' / 'models' / 'mistral.py').read_text()}```" in page
