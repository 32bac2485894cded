"""What jobs have computed that the node may want to keep: offered at once, written when the node says where.

An offer holds copies of windows and states, which go on changing, and a reference to the cache of the job, whose
full-attention rows do not. Nothing waits for the node but the terminal event of the job.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers.cache_utils import Cache

from engines.embedded.cache import state_layer, token_layer
from engines.embedded.pages import PageMemory
from engines.protocol import JobEvent, Offered, StoreCommand, Stored
from kvcache.blocks import PageGeometry
from kvcache.layout import GroupKind, KVLayout
from kvcache.plan import Piece

logger = logging.getLogger(__name__)

Copies = dict[tuple[int, int, int], torch.Tensor]
"""(group, layer, tensor) to a copy of it."""


def copy_states(layout: KVLayout, cache: Cache) -> Copies:
    """All states as they are now."""
    return {
        (g, n, t): state_layer(cache, layer.index).state(t).clone()
        for g, group in enumerate(layout.groups)
        if group.kind is GroupKind.STATE
        for n, layer in enumerate(group.layers)
        for t in range(len(layer.tensors))
    }


def copy_windows(layout: KVLayout, cache: Cache, position: int) -> Copies:
    """All windows as they were at ``position``, of which the cache must still hold every row."""
    return {
        (g, n, t): token_layer(cache, layer.index).tokens(t, group.first_token(position), position).clone()
        for g, group in enumerate(layout.groups)
        if group.kind is GroupKind.SLIDING
        for n, layer in enumerate(group.layers)
        for t in range(len(layer.tensors))
    }


@dataclass(frozen=True, slots=True)
class Offer:
    """Blocks [start, stop) of ``cache``, and windows and states at ``stop``; ``ends`` None: the blocks alone."""

    start: int
    stop: int
    cache: Cache
    ends: Copies | None

    def write(self, geometry: PageGeometry, memory: PageMemory, pages: tuple[int, ...]) -> None:
        """Fill ``pages``. Raises ValueError where they are not as many as this takes."""
        table = (geometry.blocks_only if self.ends is None else geometry).table(self.start, self.stop, pages)
        for g, group in enumerate(geometry.layout.groups):
            for n, layer in enumerate(group.layers):
                for t in range(len(layer.tensors)):
                    if group.kind is GroupKind.FULL:
                        start = self.start
                        source = token_layer(self.cache, layer.index).tokens(t, start, self.stop)
                    elif self.ends is None:
                        continue
                    else:
                        start = self.stop if group.kind is GroupKind.STATE else group.first_token(self.stop)
                        source = self.ends[g, n, t]
                    memory.write(table.extents(Piece(0, g, n, t, start, self.stop, 0, 0)), source)


class OfferDesk:
    """The offers of all jobs, and the terminal events that wait for them."""

    def __init__(self, geometry: PageGeometry, memory: PageMemory, send: Callable[[JobEvent], None]) -> None:
        self._geometry = geometry
        self._memory = memory
        self._send = send
        self._offers: dict[str, dict[int, Offer]] = {}
        self._ends: dict[str, JobEvent] = {}

    def offer(self, job: str, offer: Offer) -> None:
        """Tell the node."""
        self._offers.setdefault(job, {})[offer.stop] = offer
        self._send(Offered(job, offer.start, offer.stop, offer.ends is not None))

    def waits(self, job: str) -> bool:
        """Whether something of this job is on offer."""
        return job in self._offers

    def store(self, command: StoreCommand) -> None:
        """The node's answer. One to a job that is over, or to no offer, is ignored."""
        offers = self._offers.get(command.job, {})
        offer = offers.pop(command.stop, None)
        if offer is None:
            return
        written = bool(command.pages)
        if written:
            try:
                offer.write(self._geometry, self._memory, command.pages)
            except Exception:
                logger.exception("an offer was not stored job=%s", command.job)
                written = False
        self._send(Stored(command.job, command.stop, written))
        if not offers:
            del self._offers[command.job]
            end = self._ends.pop(command.job, None)
            if end is not None:
                self._send(end)

    def end(self, event: JobEvent) -> None:
        """Send a job's terminal event as soon as nothing of it is on offer."""
        if event.job in self._offers:
            self._ends[event.job] = event
        else:
            self._send(event)

    def forget(self, job: str) -> bool:
        """Drop a job's offers; True where its terminal event waited for them, and will not come."""
        self._offers.pop(job, None)
        return self._ends.pop(job, None) is not None
