"""The report as CSV: one figure a row, under a name that says where in the report it stands.

``capacity.stages.0.full_at`` is the field of that name in the JSON form. Cells that a spreadsheet would take for a
formula are preceded by an apostrophe.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from typing import Any

import msgspec

from scheduler.report.report import Report

_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def csv_text(report: Report) -> str:
    """All figures, in the order of the JSON form."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(("figure", "value"))
    for name, value in _flat("", msgspec.json.decode(msgspec.json.encode(report))):
        writer.writerow((name, _cell(value)))
    return out.getvalue()


def _flat(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{name}.{key}" if name else key, inner)
    elif isinstance(value, list):
        for index, inner in enumerate(value):
            yield from _flat(f"{name}.{index}", inner)
    else:
        yield name, value


def _cell(value: Any) -> Any:
    """Numbers as they are; nothing for what is not known."""
    if isinstance(value, str) and value.startswith(_FORMULA):
        return "'" + value
    return "" if value is None else value
