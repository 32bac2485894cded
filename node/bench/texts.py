"""Texts that every machine with Python has: its own language reference (English prose) and its library's sources."""

from __future__ import annotations

import sysconfig
from pathlib import Path
from pydoc_data.topics import topics

_SOURCES = (
    *("argparse", "ast", "calendar", "configparser", "dataclasses", "difflib", "fractions", "inspect", "statistics"),
    *("textwrap", "tarfile", "zipfile", "pathlib", "typing", "unittest/mock", "shutil", "optparse", "pickle"),
    *("subprocess", "threading"),
)


def documents(count: int) -> list[str]:
    """``count`` long texts, prose and program by turns, the same for one version of Python.

    Raises ValueError for more than twice as many as there are sources.
    """
    if not 1 <= count <= 2 * len(_SOURCES):
        raise ValueError(f"documents: 1 to {2 * len(_SOURCES)} can be made, not {count}")
    prose = _parts((count + 1) // 2)
    return [_source(n // 2) if n % 2 else prose[n // 2] for n in range(count)]


def other_documents() -> list[str]:
    """Twenty more such texts; the beginnings of ``documents(20)``, ten thousand characters each, are not in them."""
    later = [part[len(part) // 2 :] for part in _parts(10)]
    return [text for number in range(10) for text in (later[number], _source(len(_SOURCES) // 2 + number))]


def _parts(count: int) -> list[str]:
    """The language reference in ``count`` equal parts. Its topics repeat each other: every paragraph comes once."""
    paragraphs = (paragraph for name in sorted(topics) for paragraph in topics[name].split("\n\n"))
    prose = "\n\n".join(dict.fromkeys(paragraphs))
    size = len(prose) // count
    return [prose[n * size : (n + 1) * size] for n in range(count)]


def _source(number: int) -> str:
    """One module, and those after it: no reader runs out of text, however its tokeniser cuts."""
    library = Path(sysconfig.get_path("stdlib"))
    names = _SOURCES[number:] + _SOURCES[:number]
    return "\n".join(_read(library / f"{name}.py") for name in names[:3])


def _read(path: Path) -> str:
    if not path.is_file():
        path = path.with_suffix("") / "__init__.py"
    return path.read_text(encoding="utf-8")
