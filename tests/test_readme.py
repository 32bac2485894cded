"""README is short, and docs/modules.md has every module."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from tests.test_rooms import ROOMS, module_files

ROOT = Path(__file__).parent.parent
MODULES = (ROOT / "docs" / "modules.md").read_text()


def listed_modules() -> list[str]:
    found, room = [], ""
    for line in MODULES.splitlines():
        if heading := re.match(r"\*\*(\w+)/\*\*", line):
            room = heading[1]
        elif row := re.match(r"\| `([\w/]+\.py)` \| .+ \|$", line):
            found.append(f"{room}/{row[1]}")
    return found


def test_every_module_that_is_listed_is_there_and_is_listed_once() -> None:
    modules = listed_modules()
    assert len(modules) > 50
    assert [module for module in modules if not (ROOT / module).is_file()] == []
    assert sorted(modules) == sorted(set(modules))


def test_every_module_of_the_rooms_is_listed() -> None:
    listed = set(listed_modules())
    missing = [
        str(path.relative_to(ROOT))
        for room in ROOMS
        for path in module_files(room)
        if str(path.relative_to(ROOT)) not in listed and ast.parse(path.read_text()).body
    ]
    assert missing == [], "give each a row in docs/modules.md"


def test_readme_is_read_in_a_few_minutes() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200
