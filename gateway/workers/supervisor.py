"""The parent of workers: starts them, starts again whoever died, passes signals on, and ends with them.

It runs no event loop and no thread, so that forking it is safe at any time.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from signal import SIGCHLD, SIGHUP, SIGINT, SIGKILL, SIGTERM

log = logging.getLogger(__name__)

MISCONFIGURED = 78
"""Exit status of a worker that another start would not help (EX_CONFIG of sysexits.h)."""
FIRST_PAUSE_S = 0.5
LAST_PAUSE_S = 30.0
STEADY_S = 60.0
"""One that lived so long begins anew with the shortest pause."""
_HEARD = {SIGTERM, SIGINT, SIGHUP, SIGCHLD}
_PR_SET_PDEATHSIG = 1


class Misconfigured(Exception):
    """What a worker raises to end all of them; it has said why."""


@dataclass(slots=True)
class _Place:
    """One worker's place, with who is in it and when the next one may be."""

    number: int
    pid: int = 0
    born: float = 0.0
    pause_s: float = 0.0
    due: float = 0.0


class Supervisor:
    """``work`` runs a worker of a number in a process of its own; one that returns is followed by another at once."""

    def __init__(self, count: int, work: Callable[[int], None], patience_s: float) -> None:
        self._places = [_Place(number) for number in range(count)]
        self._work = work
        self._patience_s = patience_s
        self._stopping_since: float | None = None
        self._status = 0

    def run(self) -> int:
        """Until a signal and the last worker's end; returns the exit status."""
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _HEARD)
        try:
            while self._stopping_since is None or any(place.pid for place in self._places):
                self._fill()
                heard = signal.sigtimedwait(_HEARD, self._wait_s())
                if heard is not None:
                    self._on_signal(heard.si_signo)
                self._reap()
                self._lose_patience()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return self._status

    def _fill(self) -> None:
        """Start who is missing and due."""
        now = time.monotonic()
        for place in self._places:
            if not place.pid and self._stopping_since is None and now >= place.due:
                place.pid, place.born = self._fork(place.number), now

    def _wait_s(self) -> float:
        """Until the next one is due; signals wake sooner."""
        now = time.monotonic()
        return max(0.0, min([1.0, *(place.due - now for place in self._places if not place.pid)]))

    def _on_signal(self, number: int) -> None:
        if number == SIGCHLD:
            return
        if number == SIGHUP:
            self._tell(SIGHUP)
            return
        if self._stopping_since is None:
            self._stopping_since = time.monotonic()
        self._tell(SIGTERM)  # the second one makes workers end at once, as it does a gateway alone

    def _reap(self) -> None:
        for place in self._places:
            if not place.pid:
                continue
            pid, status = os.waitpid(place.pid, os.WNOHANG)
            if pid:
                self._ended(place, os.waitstatus_to_exitcode(status))

    def _ended(self, place: _Place, code: int) -> None:
        now = time.monotonic()
        lived, place.pid = now - place.born, 0
        if self._stopping_since is not None:
            return
        if code == MISCONFIGURED:
            self._status = 1
            self._stopping_since = now
            self._tell(SIGTERM)
            return
        if code == 0:  # it was told to end, and nobody told the parent: it is restarted, the others go on
            place.pause_s, place.due = 0.0, now
            log.info("worker ended number=%d lived_s=%.1f", place.number, lived)
            return
        place.pause_s = FIRST_PAUSE_S if lived >= STEADY_S else min(LAST_PAUSE_S, 2 * place.pause_s or FIRST_PAUSE_S)
        place.due = now + place.pause_s
        log.error("worker died number=%d code=%d lived_s=%.1f again_in_s=%g", place.number, code, lived, place.pause_s)

    def _lose_patience(self) -> None:
        if self._stopping_since is not None and time.monotonic() > self._stopping_since + self._patience_s:
            self._tell(SIGKILL)

    def _tell(self, number: int) -> None:
        for place in self._places:
            if place.pid:
                os.kill(place.pid, number)  # not reaped yet, so the pid is still its own

    def _fork(self, number: int) -> int:
        parent = os.getpid()
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid:
            return pid
        status = 1
        try:
            os.setpgid(0, 0)  # a terminal's Ctrl-C goes to the parent, which passes it on once
            _die_with(parent)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, _HEARD)
            self._work(number)
            status = 0
        except Misconfigured:
            status = MISCONFIGURED
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)


def _die_with(parent: int) -> None:
    """Have the kernel end this process when its parent is gone, in whatever way."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, SIGTERM)
    if os.getppid() != parent:
        os._exit(1)
