"""What the readers of traces share: lines in, checked rows out, and which line was wrong."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator
from datetime import datetime
from math import isfinite, nan
from typing import Any

import msgspec
import numpy as np

from scheduler.simulator.traffic import Traffic

MOST_TOKENS = 1 << 31


class TraceError(ValueError):
    """A line that is not of the format; says which, and what is wrong."""


class Rows:
    """Collects requests and makes traffic of them, in the order of their arrival and from second 0."""

    def __init__(self, block_tokens: int = 0) -> None:
        self._block_tokens = block_tokens
        self._rows: list[tuple[float, int, int, tuple[int, ...]]] = []

    def add(self, at_s: float, prompt: int, output: int, blocks: tuple[int, ...] = ()) -> None:
        """One request; prompts and outputs of nothing count as one token."""
        self._rows.append((at_s, max(1, prompt), max(1, output), blocks))

    def traffic(self) -> Traffic:
        """All of them. Raises TraceError where there are none."""
        if not self._rows:
            raise TraceError("the trace holds no requests")
        rows = sorted(self._rows, key=lambda row: row[0])
        begin = rows[0][0]
        return Traffic(
            np.array([row[0] - begin for row in rows]),
            np.array([row[1] for row in rows], dtype=np.int64),
            np.array([row[2] for row in rows], dtype=np.int64),
            tuple(row[3] for row in rows) if self._block_tokens else (),
            self._block_tokens,
        )


def json_rows(lines: Iterable[str]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Number and object of every line of JSONL that is not empty. Raises TraceError."""
    for number, line in enumerate(lines, start=1):
        if line.strip():
            try:
                yield number, msgspec.json.decode(line, type=dict[str, Any])
            except msgspec.DecodeError as error:
                raise TraceError(f"line {number}: {error}") from error


def csv_rows(lines: Iterable[str], needed: tuple[str, ...]) -> Iterator[tuple[int, dict[str, str]]]:
    """Number and fields of every row of CSV with a header. Raises TraceError where a needed column is missing."""
    reader = csv.DictReader(lines)
    try:
        missing = [name for name in needed if name not in (reader.fieldnames or ())]
    except csv.Error as error:
        raise TraceError(f"line 1: {error}") from error
    if missing:
        raise TraceError(f"line 1: no column {missing[0]!r}; this format has {', '.join(needed)}")
    try:
        yield from enumerate(reader, start=2)
    except csv.Error as error:
        raise TraceError(f"line {reader.line_num + 1}: {error}") from error


def count(row: dict[str, Any], field: str, number: int) -> int:
    """A number of tokens. Raises TraceError."""
    given = row.get(field)
    try:
        found = int(given)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        found = None
    if found is None or isinstance(given, bool) or (isinstance(given, float) and given != found):
        raise TraceError(f"line {number}: {field} must be a whole number, got {_short(given)}")
    if not 0 <= found <= MOST_TOKENS:
        raise TraceError(f"line {number}: {field} must be from 0 to {MOST_TOKENS}, got {_short(given)}")
    return found


def seconds(row: dict[str, Any], field: str, number: int, unit_s: float = 1.0) -> float:
    """A moment in seconds. Raises TraceError."""
    given = row.get(field)
    try:
        found = float(given) * unit_s  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        found = nan
    if not isfinite(found):
        raise TraceError(f"line {number}: {field} must be a finite number, got {_short(given)}")
    return found


def moment(text: str | None, number: int) -> float:
    """A date and time, of whatever precision, as seconds. Raises TraceError."""
    if text is None:
        raise TraceError(f"line {number}: the date and time is missing")
    whole, _, part = text.strip().partition(".")
    try:
        return datetime.fromisoformat(whole + "+00:00").timestamp() + float(f"0.{part or 0}")
    except ValueError:
        raise TraceError(f"line {number}: {_short(text)} is not a date and time") from None


def names(row: dict[str, Any], number: int) -> tuple[int, ...]:
    """Names of a prompt's blocks. Raises TraceError."""
    found = row.get("hash_ids")
    if not isinstance(found, list) or not all(type(name) is int and name >= 0 for name in found):
        raise TraceError(f"line {number}: hash_ids must be a list of whole numbers")
    return tuple(found)


def _short(given: Any) -> str:
    """What stood there, as far as it fits into a line."""
    return repr(given)[:60]
