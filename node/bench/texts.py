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
    prose = "\n\n".join(topics[name] for name in sorted(topics))
    part = len(prose) // ((count + 1) // 2)
    library = Path(sysconfig.get_path("stdlib"))
    texts = []
    for n in range(count):
        if n % 2 == 0:
            texts.append(prose[n // 2 * part : (n // 2 + 1) * part])
        else:
            texts.append(_source(library, n // 2))
    return texts


def _source(library: Path, number: int) -> str:
    """One module, and those after it: no reader runs out of text, however its tokeniser cuts."""
    names = _SOURCES[number:] + _SOURCES[:number]
    return "\n".join(_read(library / f"{name}.py") for name in names[:3])


def _read(path: Path) -> str:
    if not path.is_file():
        path = path.with_suffix("") / "__init__.py"
    return path.read_text(encoding="utf-8")
