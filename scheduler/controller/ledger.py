"""Keeps account of what is spoken, by when each answer began: what an ``Observation`` is told of outputs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable

from scheduler.controller.observation import Spoken

TOGETHER_S = 10.0
"""Answers that begin within the same so many seconds count as one group."""


def added(accounts: Iterable[Spoken]) -> tuple[Spoken, ...]:
    """Several accounts as one, oldest group first; those of other clocks fall into the groups of this one."""
    tokens: dict[float, int] = {}
    ends: dict[float, int] = {}
    for one in accounts:
        group = one.begun // TOGETHER_S * TOGETHER_S
        tokens[group] = tokens.get(group, 0) + one.tokens
        ends[group] = ends.get(group, 0) + one.ends
    return tuple(Spoken(group, tokens[group], ends[group]) for group in sorted(tokens))


class Ledger:
    """Answers by any name. ``take`` gives what came since it was last called."""

    def __init__(self) -> None:
        self._begun: dict[Hashable, float] = {}
        self._tokens: dict[float, int] = {}
        self._ends: dict[float, int] = {}

    def spoke(self, answer: Hashable, tokens: int, now: float) -> None:
        """More tokens of an answer; the first ones begin it."""
        group = self._begun.setdefault(answer, now // TOGETHER_S * TOGETHER_S)
        self._tokens[group] = self._tokens.get(group, 0) + tokens

    def ended(self, answer: Hashable, whole: bool = True) -> None:
        """An answer is over; one that broke off is no evidence of how long answers are, and its end does not count."""
        group = self._begun.pop(answer, None)
        if group is not None and whole:
            self._ends[group] = self._ends.get(group, 0) + 1

    def take(self) -> tuple[Spoken, ...]:
        """The account since the last call, oldest group first."""
        groups = sorted(self._tokens.keys() | self._ends.keys())
        found = tuple(Spoken(group, self._tokens.get(group, 0), self._ends.get(group, 0)) for group in groups)
        self._tokens.clear()
        self._ends.clear()
        return found
