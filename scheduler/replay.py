"""Deciding again from a record: the same facts and the same values must give the same decision, to the byte.

Both decisions are written in one canonical form: the fields of the structs in their order, sets sorted. A record of an
older schema stays readable for people, but holds too little to decide by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import msgspec

from scheduler.decision import Decision
from scheduler.facts import Facts
from scheduler.policy import RoutingPolicy
from scheduler.values import PolicyValues

SCHEMA = 2
"""Of decision records. 1, which has no number in it, knew no policy values and fewer facts."""

_encoder = msgspec.json.Encoder(order="deterministic")


class RecordError(ValueError):
    """A line that is no decision record of this schema; the text says why."""


class Replayed(msgspec.Struct, frozen=True):
    """One decision of a record, as it was and as it is decided now, both canonical JSON."""

    record_id: str
    kind: str
    recorded: bytes
    again: bytes

    @property
    def same(self) -> bool:
        """Whether not a byte differs."""
        return self.recorded == self.again


class _Record(msgspec.Struct):
    """What of a record is needed. ``retried`` were decided as the first, after a node held less than was thought or one
    remote way failed and left another; ``fallback_retried`` as the fallback, after that failed too."""

    id: str
    schema: int = 1
    policy: PolicyValues | None = None
    decision: Decision | None = None
    retried: tuple[Decision, ...] = ()
    fallback_decision: Decision | None = None
    fallback_retried: tuple[Decision, ...] = ()


class _Head(msgspec.Struct):
    schema: int = 1


def canonical(decision: Decision) -> bytes:
    """The one way in which a decision is written for comparing."""
    return _encoder.encode(decision)


def replay(line: bytes) -> Iterator[Replayed]:
    """Decide again whatever a record holds, with the values that were in force. Raises RecordError."""
    record = _read(line)
    policy = RoutingPolicy(record.policy)
    ways = [("first", record.decision), *(("retry", one) for one in record.retried)]
    for kind, was in ways:
        if was is not None:
            yield Replayed(record.id, kind, canonical(was), _again(policy.decide, was.facts))
    for was in (record.fallback_decision, *record.fallback_retried):
        if was is None:
            continue
        yield Replayed(record.id, "fallback", canonical(was), _again(policy.fall_back, was.facts))


def _again(decide: Callable[[Facts], Decision], facts: Facts) -> bytes:
    try:
        return canonical(decide(facts))
    except (ValueError, ArithmeticError) as error:  # a gateway has no such facts: somebody else wrote this
        raise RecordError(f"no facts to decide by: {error}") from error


def _read(line: bytes) -> _Record:
    try:
        schema = msgspec.json.decode(line, type=_Head).schema
        if schema != SCHEMA:
            raise RecordError(f"a record of schema {schema} cannot be decided again, only one of schema {SCHEMA}")
        return msgspec.json.decode(line, type=_Record)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise RecordError(f"no decision record: {error}") from error
