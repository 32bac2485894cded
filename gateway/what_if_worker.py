"""Answers one what-if question in a process of its own: ``python -m gateway.what_if_worker``.

A simulation takes a processor for seconds; in the gateway's process it would hold up every request. The task comes on
standard input as msgpack, and JSON lines go out: ``{"progress": 0.4}`` now and then, at last ``{"answer": ...}`` or
``{"error": ...}``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any, BinaryIO

import msgspec

from scheduler.values import PolicyValues
from scheduler.what_if.answer import answer
from scheduler.what_if.basis import Basis
from scheduler.what_if.question import Question

NICENESS = 10
PROGRESS_STEP = 0.01


class Task(msgspec.Struct, frozen=True):
    """All that a worker needs."""

    basis: Basis
    question: Question
    values: PolicyValues


def work(task: bytes, out: BinaryIO) -> None:
    """Write the lines of one task."""
    tell = _teller(out)
    try:
        asked = msgspec.msgpack.decode(task, type=Task)
        tell("answer", answer(asked.basis, asked.question, asked.values, _progress(tell)))
    except ValueError as error:
        tell("error", str(error))


def _teller(out: BinaryIO) -> Callable[[str, Any], None]:
    def tell(kind: str, value: Any) -> None:
        out.write(msgspec.json.encode({kind: value}) + b"\n")
        out.flush()

    return tell


def _progress(tell: Callable[[str, Any], None]) -> Callable[[float], None]:
    said = 0.0

    def progress(share: float) -> None:
        nonlocal said
        if share >= said + PROGRESS_STEP:
            said = share
            tell("progress", round(share, 3))

    return progress


if __name__ == "__main__":
    os.nice(NICENESS)
    work(sys.stdin.buffer.read(), sys.stdout.buffer)
