"""The page map of docs/architecture.md is what the engine does."""

from __future__ import annotations

import re
from pathlib import Path

from tests.engine.page_map import draw

DOCUMENT = Path(__file__).parents[2] / "docs" / "architecture.md"


def test_the_page_map_in_the_docs_is_what_the_engine_does():
    (shown,) = re.findall(r"```\n(turn   1 .*?)\n```", DOCUMENT.read_text(), re.DOTALL)
    assert shown == draw()


def test_the_example_shows_each_fate_of_a_page():
    drawn = draw()
    for event in ("takes", "shares", "grows into", "is preempted", "ends", "evicted"):
        assert event in drawn, f"nobody {event}"
    resumed = drawn.index("C shares", drawn.index("C is preempted"))  # from the cache, with what it gave back
    assert resumed > 0
    assert "AB" in drawn
    assert " ~" in drawn
