"""What vLLM's scheduler tells its workers of our jobs, step by step. Plain values: they cross processes by pickle."""

from __future__ import annotations

from dataclasses import dataclass

Blocks = tuple[list[int], ...]
"""A request's block ids by KV cache group and then by position; 0 where a window has moved on."""


@dataclass(frozen=True, slots=True)
class Computing:
    """This step computes tokens [begin, end) of a job's request; those before are in ``blocks``, as windows allow."""

    job: str
    begin: int
    end: int
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Loading:
    """Tokens [begin, end) are to be loaded into ``blocks``, of which those before ``begin`` are others', too."""

    job: str
    request: str
    begin: int
    end: int
    blocks: Blocks


@dataclass(frozen=True, slots=True)
class Ending:
    """A request is over: ``tokens`` of it are in ``blocks``, which are freed when its id is reported as sent.

    ``blocks`` is None where nothing is kept and nothing waits.
    """

    job: str
    request: str
    tokens: int = 0
    blocks: Blocks | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """One step. ``unneeded`` jobs will load nothing, because vLLM has those tokens; ``idle``: nothing is computed."""

    computing: tuple[Computing, ...] = ()
    loading: tuple[Loading, ...] = ()
    unneeded: tuple[str, ...] = ()
    ending: tuple[Ending, ...] = ()
    idle: bool = False
