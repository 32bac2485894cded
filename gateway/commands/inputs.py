"""What commands are given: numbers that are numbers, files that can be written, and one line about what cannot be used.

Whoever is wrong about an option gets exit code 2, as click gives it for the options that it checks itself.
"""

from __future__ import annotations

from math import isfinite
from pathlib import Path
from typing import Any

import click


class Unusable(click.ClickException):
    """Something given cannot be used; the message names it and says what can."""

    exit_code = 2


class Finite(click.FloatRange):
    """A range that neither NaN nor infinity is in, whatever its open end."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number. Fails as click's own ranges do."""
        found: float = super().convert(value, param, ctx)
        if not isfinite(found):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return found


def check_writable(option: str, file: Path | None) -> None:
    """Find out before minutes are spent on what could not be kept; the file stays as it is. Raises Unusable."""
    if file is None:
        return
    there = file.exists()
    try:
        file.open("ab").close()
        if not there:
            file.unlink()
    except OSError as error:
        raise Unusable(f"{option} {file}: {error.strerror}") from error
