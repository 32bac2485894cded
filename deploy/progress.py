"""Progress that a person can watch and a log can keep: one line per step, with its time, and signs of life between."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console

QUIET_S = 10.0


class Step:
    """One step under way; ``detail`` is shown beside its title."""

    def __init__(self, title: str) -> None:
        self.title = title
        self.detail = ""

    def line(self, elapsed: float) -> str:
        """The step as text, with the seconds it has taken so far."""
        return f"{self.title}{f' ({self.detail})' if self.detail else ''} {elapsed:.0f} s"


class Progress:
    """Shows steps on a console: a live spinner on a terminal, a line at least every ten seconds elsewhere."""

    def __init__(self, console: Console) -> None:
        self.console = console

    def note(self, text: str) -> None:
        """Say something once."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def step(self, title: str) -> Iterator[Step]:
        """Show ``title`` until the block ends, then how long it took."""
        step = Step(title)
        started = time.monotonic()
        with _Ticker(self.console, step, started):
            yield step
        self.note(f"  done  {step.line(time.monotonic() - started)}")


class _Ticker:
    """Keeps the step's line moving from a thread of its own, so that the work may block."""

    def __init__(self, console: Console, step: Step, started: float) -> None:
        self._console = console
        self._step = step
        self._started = started
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="progress", daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        if self._console.is_terminal:
            with self._console.status(self._step.title) as status:
                while not self._stop.wait(0.2):
                    status.update(self._step.line(time.monotonic() - self._started))
            return
        while not self._stop.wait(QUIET_S):
            line = self._step.line(time.monotonic() - self._started)
            self._console.print(f"  ....  {line}", highlight=False, markup=False, soft_wrap=True)
