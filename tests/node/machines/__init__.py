"""Machines as text: what commands print and files hold on them, each file with its sources in its first lines.

``hostname NAME``, then ``$ COMMAND`` and what it prints, and ``= FILE`` and what it holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
SHAPES = tuple(sorted(file.stem for file in HERE.glob("*.txt")))


class TextMachine:
    """A machine that was written down. ``without`` drops what begins so: commands and files that are missing."""

    def __init__(self, shape: str, without: tuple[str, ...] = ()) -> None:
        self.header: list[str] = []
        self.hostname = ""
        self._runs: dict[str, str] = {}
        self._files: dict[str, str] = {}
        into: dict[str, str] | None = None
        name = ""
        for line in (HERE / f"{shape}.txt").read_text().splitlines():
            kind, _, rest = line.partition(" ")
            if kind == "#":
                self.header.append(rest)
            elif kind == "hostname":
                self.hostname = rest
            elif kind in ("$", "="):
                into, name = (self._runs if kind == "$" else self._files), rest
                into[name] = ""
            elif into is not None:
                into[name] += line + "\n"
        for kept in (self._runs, self._files):
            for key in [key for key in kept if key.startswith(without)] if without else ():
                del kept[key]

    def read(self, path: str) -> str | None:
        found = self._files.get(path)
        return None if found is None else found.strip()

    def names(self, path: str) -> Sequence[str]:
        inside = {file.removeprefix(path + "/").split("/")[0] for file in self._files if file.startswith(path + "/")}
        return sorted(inside)

    def run(self, *command: str) -> str | None:
        return self._runs.get(" ".join(command))
