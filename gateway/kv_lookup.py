"""What routing asks of whoever owns the prefix index: this process, or another one that serves several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import msgspec


class Held(msgspec.Struct, frozen=True, gc=False):
    """Of a prompt, in tokens: full-attention blocks of the first ``held`` are on a node, and prefill can resume there
    after ``resumable``. Not ``exact`` is what was sent there before, for want of events. ``dp_rank`` is where it lies.
    Of it, ``in_files`` tokens, and with ``end_in_files`` what is needed to resume, must be read from files first.
    """

    held: int
    resumable: int
    exact: bool = True
    dp_rank: int | None = None
    in_files: int = 0
    end_in_files: bool = False


class PrefixLookup(Protocol):
    """What routing asks of whoever owns the index, in this process or another."""

    def matches(self, names: Sequence[bytes], now: float) -> Mapping[str, Held]:
        """What each node holds of a prompt whose full blocks have these names; only nodes that hold something."""

    def sent(self, node_id: str, names: Sequence[bytes], now: float) -> None:
        """A prompt went to a node: all that is known of one that sends no events."""

    def distrust(self) -> None:
        """An engine counts other tokens for the same prompt: names computed here mean nothing to it."""
