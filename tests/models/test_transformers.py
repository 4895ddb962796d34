"""Every family against transformers itself, where that is installed: other versions, and other prompts.

`pip install -e ".[test,transformers]"` installs it. Figures of one version are in test_family_figures.py.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tests.models.family_configs import CASES
from tests.models.family_weights import checksum, tensors
from tests.models.test_family_figures import CASES as COMPARED
from tests.models.test_family_figures import check_runs

SCRIPT = Path(__file__).parents[2] / "scripts" / "record_families.py"
INSTALL = 'not installed: pip install -e ".[transformers]"'
pytest.importorskip("torch", reason=f"torch is {INSTALL}")
pytest.importorskip("transformers", reason=f"transformers is {INSTALL}")
FIRST_SEED = 1000  # of prompts that are not the recorded ones


@pytest.fixture(scope="module")
def figures():
    """The script that records them."""
    spec = importlib.util.spec_from_file_location("record_families", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.prepare()
    return module


@pytest.mark.parametrize("name", COMPARED)
def test_prefill_chunks_and_decode_give_what_the_installed_transformers_gives(name, figures, tmp_path):
    config = CASES[name].config
    shapes = figures.checkpoint_shapes(config)  # as this version names its tensors
    made = tensors(config, shapes)
    runs = {kind: figures.clear_run(config, made, kind, FIRST_SEED) for kind in figures.PROMPTS}
    case = {"config": config, "shapes": shapes, "weights_crc32": checksum(made), "runs": runs}
    check_runs(case, "xla", tmp_path)
