"""What README promises can be found."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()


def listed_modules() -> list[str]:
    found, room = [], ""
    for line in README.split("## Modules")[1].splitlines():
        if heading := re.match(r"\*\*(\w+)/\*\*", line):
            room = heading[1]
        elif row := re.match(r"\| `([\w/]+\.py)` \|", line):
            found.append(f"{room}/{row[1]}")
    return found


def test_every_module_that_readme_lists_is_there() -> None:
    modules = listed_modules()
    assert len(modules) > 50
    assert [module for module in modules if not (ROOT / module).is_file()] == []


@pytest.mark.parametrize("command", ["gateway", "node", "up"])
def test_every_flag_that_readme_names_exists(command: str) -> None:
    named = {
        flag
        for flags, of in re.findall(r"^\| (`--[^|]*) \| ([\w, ]+) \|", README, re.MULTILINE)
        if command in of.split(", ")
        for flag in re.findall(r"`(--[\w-]+)", flags)
    }
    if command == "up":
        row = next(line for line in README.splitlines() if line.startswith("| `prfaas up"))
        named = set(re.findall(r"--[\w-]+", row))
    run = {"gateway": "gateway.commands.run", "node": "node.cli", "up": "deploy.cli"}[command]
    code = f"from {run} import {command}; {command}()"
    done = subprocess.run([sys.executable, "-c", code, "--help"], capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert named, "README names no flag of this command"
    assert [flag for flag in sorted(named) if flag not in done.stdout] == []
