"""docs/configuration.md is what the code says."""

from __future__ import annotations

import re
from pathlib import Path

from deploy.flags import reference

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_the_page_is_what_is_generated_now() -> None:
    assert PAGE.read_text() == reference(), "make it anew: python -m deploy.flags > docs/configuration.md"


def test_every_flag_is_explained() -> None:
    rows = re.findall(r"^\| (`--.*`) \| (.*) \| (.*) \|$", reference(), re.MULTILINE)
    assert len(rows) > 80
    assert [flag for flag, _, meaning in rows if not meaning.strip()] == []


def test_values_with_bars_do_not_end_a_cell() -> None:
    for line in reference().splitlines():
        if line.startswith("| `--"):
            assert len(re.findall(r"(?<!\\)\|", line)) == 4, line
