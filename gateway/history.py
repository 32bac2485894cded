"""What the long-term loop did and saw, kept in the state: conversions, actions with their reasons, traffic by slot.

Of several gateways the leader writes; the others take what it wrote under the same numbers, so that any of them can go
on from there.

The rebalancing report is written from here. Conversions are few and kept whole; the rest is bounded.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from enum import StrEnum
from typing import Any

import msgspec

from gateway.state import State
from scheduler.controller.forecast import DAYS_KEPT, SLOTS, SlotRecord

KEPT_CONVERSIONS = 10_000
KEPT_ACTIONS = 10_000


class Phase(StrEnum):
    """Where a conversion stands. The last five are its ends.

    ``ROLLED_BACK``: the node plays its old role again. ``LOST``: it left, and plays what it says when it joins again.
    ``STUCK``: it could not be put back; it is given no work until it joins anew. ``INTERRUPTED``: the gateway ended
    meanwhile.
    """

    DRAINING = "draining"
    FLIPPING = "flipping"
    VERIFYING = "verifying"
    RESTORING = "restoring"
    DONE = "done"
    ROLLED_BACK = "rolled_back"
    LOST = "lost"
    STUCK = "stuck"
    INTERRUPTED = "interrupted"

    @property
    def over(self) -> bool:
        """Whether nothing more happens."""
        return self in _ENDS


_ENDS = {Phase.DONE, Phase.ROLLED_BACK, Phase.LOST, Phase.STUCK, Phase.INTERRUPTED}


class ConversionRecord(msgspec.Struct, frozen=True):
    """One conversion. Times are Unix seconds. ``steps`` are (time, phase) in order; ``detail`` says what went wrong.

    ``figures`` is what the controller thought then: capacities and gain, empty for one that a person forced.
    """

    id: int
    node_id: str
    role_from: str
    role_to: str
    epoch: int
    began: float
    phase: Phase
    reason: str
    by: str
    proposal: int | None = None
    ended: float | None = None
    detail: str = ""
    steps: tuple[tuple[float, Phase], ...] = ()
    figures: dict[str, Any] = {}


class ActionRecord(msgspec.Struct, frozen=True):
    """Something that the controller or a person did about the split or the threshold."""

    at: float
    what: str
    reason: str
    figures: dict[str, Any] = {}


class History:
    """Reads and writes the tables of the long-term loop. Opening it ends what an earlier process left unfinished."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.on_kept: Callable[[str, str, bytes], None] | None = None
        """Called with kind, key and row of all that is written here; returns at once."""
        self.end_unfinished()

    def end_unfinished(self, but: Collection[int] = ()) -> list[ConversionRecord]:
        """End conversions that whoever began them left in the middle, ``but`` those that go on; returns them."""
        ended = []
        for record in self.conversions(KEPT_CONVERSIONS):
            if not record.phase.over and record.id not in but:
                now = time.time()
                ended.append(
                    msgspec.structs.replace(
                        record,
                        phase=Phase.INTERRUPTED,
                        ended=now,
                        detail="the gateway ended meanwhile; the node plays what it says when it joins",
                        steps=(*record.steps, (now, Phase.INTERRUPTED)),
                    )
                )
                self.keep(ended[-1])
        return ended

    def take(self, kind: str, key: str, row: bytes) -> None:
        """What another gateway has written. Raises ApiError; what is of no kind known here is left out."""
        match kind:
            case "conversion":
                self._state.execute("INSERT OR REPLACE INTO conversions (id, record) VALUES (?, ?)", (int(key), row))
            case "action":
                self._state.execute("INSERT OR REPLACE INTO actions (id, record) VALUES (?, ?)", (int(key), row))
            case "slot":
                day, _, slot = key.partition(".")
                self._state.execute(
                    "INSERT OR REPLACE INTO traffic_slots (day, slot, record) VALUES (?, ?, ?)",
                    (int(day), int(slot), row),
                )

    def begin(self, record: ConversionRecord) -> ConversionRecord:
        """Keep a new conversion under an id of its own."""
        rows = self._state.execute("INSERT INTO conversions (record) VALUES (?) RETURNING id", (b"",))
        numbered = msgspec.structs.replace(record, id=int(rows[0][0]))
        self.keep(numbered)
        self._state.execute("DELETE FROM conversions WHERE id <= ?", (numbered.id - KEPT_CONVERSIONS,))
        return numbered

    def keep(self, record: ConversionRecord) -> None:
        """Write what has become of a conversion."""
        row = msgspec.json.encode(record)
        self._state.execute("UPDATE conversions SET record = ? WHERE id = ?", (row, record.id))
        self._tell("conversion", str(record.id), row)

    def conversions(self, limit: int = 1000) -> list[ConversionRecord]:
        """The newest conversions, newest first."""
        rows = self._state.execute(
            "SELECT record FROM conversions WHERE record != ? ORDER BY id DESC LIMIT ?", (b"", limit)
        )
        return [msgspec.json.decode(row[0], type=ConversionRecord) for row in rows]

    def conversion(self, number: int) -> ConversionRecord | None:
        """One conversion."""
        rows = self._state.execute("SELECT record FROM conversions WHERE id = ? AND record != ?", (number, b""))
        return msgspec.json.decode(rows[0][0], type=ConversionRecord) if rows else None

    def note(self, action: ActionRecord) -> None:
        """Keep an action and its reason."""
        row = msgspec.json.encode(action)
        rows = self._state.execute("INSERT INTO actions (record) VALUES (?) RETURNING id", (row,))
        self._tell("action", str(rows[0][0]), row)
        self._state.execute("DELETE FROM actions WHERE id <= (SELECT max(id) FROM actions) - ?", (KEPT_ACTIONS,))

    def actions(self, limit: int = 1000) -> list[ActionRecord]:
        """The newest actions, newest first."""
        rows = self._state.execute("SELECT record FROM actions ORDER BY id DESC LIMIT ?", (limit,))
        return [msgspec.json.decode(row[0], type=ActionRecord) for row in rows]

    def add_slot(self, slot: SlotRecord) -> None:
        """Keep what one slot of a day brought."""
        self._state.execute(
            "INSERT OR REPLACE INTO traffic_slots (day, slot, record) VALUES (?, ?, ?)",
            (slot.day, slot.slot, msgspec.json.encode(slot)),
        )
        self._tell("slot", f"{slot.day}.{slot.slot}", msgspec.json.encode(slot))
        self._state.execute("DELETE FROM traffic_slots WHERE day <= ?", (slot.day - DAYS_KEPT,))

    def slots(self) -> tuple[SlotRecord, ...]:
        """The days' slots, oldest first."""
        rows = self._state.execute(
            "SELECT record FROM traffic_slots ORDER BY day, slot LIMIT ?", ((DAYS_KEPT + 1) * SLOTS,)
        )
        return tuple(msgspec.json.decode(row[0], type=SlotRecord) for row in rows)

    def _tell(self, kind: str, key: str, row: bytes) -> None:
        if self.on_kept is not None:
            self.on_kept(kind, key, row)
