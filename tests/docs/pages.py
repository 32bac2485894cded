"""README and docs/ as the tests of them read them: shell blocks as commands, headings as anchors, links."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Line:
    """One command of a page, its continuations joined."""

    page: Path
    text: str


def shell_lines(page: Path) -> list[Line]:
    """The commands of a page's blocks marked ``sh``, in order."""
    found = []
    for language, block in _FENCED.findall(page.read_text()):
        if language != "sh":
            continue
        for text in block.replace("\\\n", " ").splitlines():
            if text.strip() and not text.strip().startswith("#"):
                found.append(Line(page, text.strip()))
    return found


def prose(page: Path) -> str:
    """A page without its fenced blocks."""
    return _FENCED.sub("", page.read_text())


def links(page: Path) -> list[str]:
    """What a page's links point to."""
    return _LINK.findall(prose(page))


def anchors(page: Path) -> set[str]:
    """The names that its headings are linked by."""
    return {_slug(heading) for heading in _HEADING.findall(prose(page))}


def _slug(heading: str) -> str:
    plain = re.sub(r"[^\w\- ]", "", heading.replace("`", "").strip().lower())
    return plain.replace(" ", "-")
