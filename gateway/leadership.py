"""Who may change roles: one gateway at a time, with epochs that only rise."""

from __future__ import annotations

from typing import Protocol

from gateway.state import State


class Leadership(Protocol):
    """Says whether this gateway leads, and numbers its orders."""

    @property
    def leads(self) -> bool:
        """Whether it may order anything now."""

    @property
    def leader(self) -> str:
        """Where the gateway that leads is reached, "" where that is not known."""

    def next_epoch(self) -> int:
        """A fencing epoch above every one given before, by any gateway. Raises ApiError where it cannot be kept."""


class SoleGateway:
    """The only gateway of its nodes always leads; its epochs are kept in its state, so that they outlive it."""

    leads = True
    leader = ""

    def __init__(self, state: State) -> None:
        self._state = state

    def next_epoch(self) -> int:
        """Written before it is given out."""
        rows = self._state.execute(
            "INSERT INTO counters (name, value) VALUES ('role_epoch', 1) "
            "ON CONFLICT (name) DO UPDATE SET value = value + 1 RETURNING value"
        )
        return int(rows[0][0])
