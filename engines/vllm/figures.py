"""What a vLLM server says of itself: gauges and counters of its ``/metrics``, and blocks by its KV events."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from pathlib import Path

import aiohttp
import msgspec
import zmq
import zmq.asyncio

from engines.vllm.api import VllmApi
from engines.vllm.spec import EVENT_TOPIC
from kvcache.engine_figures import EngineFigures
from kvcache.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KvEvent, KvEventError, decode_batch

log = logging.getLogger(__name__)

LOOK_S = 2.0
WITHIN_S = 5.0
FULL_KIND = "full_attention"
_HWM = 10_000
_LINE = re.compile(r"^(vllm:\w+)(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
_NAMES = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_used",
    "vllm:prefix_cache_queries_total": "prefix_queries",
    "vllm:prefix_cache_hits_total": "prefix_hits",
    "vllm:num_preemptions_total": "preemptions",
    "vllm:prfaas_load_failures_total": "load_failures",
}


def read_metrics(text: str) -> dict[str, float]:
    """The figures in a ``/metrics`` text, by their names in EngineFigures, summed over labels."""
    found: dict[str, float] = {}
    for name, value in _LINE.findall(text):
        field = _NAMES.get(name)
        if field is not None:
            with contextlib.suppress(ValueError):
                found[field] = found.get(field, 0.0) + float(value)
    return found


class HeldBlocks:
    """Blocks of full attention that vLLM's prefix cache holds, by its own names: as many as it has blocks at most."""

    def __init__(self) -> None:
        self._held: set[int | bytes] = set()
        self._group: int | None = None
        self._next: int | None = None
        self.missed = 0
        """Batches that were sent and not received; after one, what is held is known again from then on only."""

    def __len__(self) -> int:
        return len(self._held)

    def batch(self, seq: int, payload: bytes) -> None:
        """Take in one numbered batch. Raises KvEventError for one that is none."""
        batch = decode_batch(payload)
        if self._next is not None and seq != self._next:
            self.missed += max(1, seq - self._next)
            self._held.clear()
        self._next = seq + 1
        for event in batch.events:
            self._apply(event)

    def _apply(self, event: KvEvent) -> None:
        match event:
            case BlockStored(kv_cache_spec_kind=kind) if kind in (None, FULL_KIND):
                self._held.update(event.block_hashes)
                self._group = event.group_idx
            case BlockRemoved(group_idx=group) if group == self._group:
                self._held.difference_update(event.block_hashes)
            case AllBlocksCleared():
                self._held.clear()
            case _:
                pass


class Watch:
    """Follows one server until cancelled; ``figures`` is what was seen last."""

    def __init__(self, api: VllmApi, events: Path) -> None:
        self.figures = EngineFigures()
        self._api = api
        self._events = events
        self._blocks = HeldBlocks()

    async def run(self) -> None:
        """Look at ``/metrics`` every two seconds, and at events as they come."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow())
            tasks.create_task(self._look())

    async def _look(self) -> None:
        while True:
            blocks = {"cached_blocks": len(self._blocks), "events_missed": self._blocks.missed}
            try:
                found = read_metrics(await self._api.metrics(WITHIN_S))
                self.figures = msgspec.convert({**found, **blocks}, EngineFigures, strict=False)
            except (aiohttp.ClientError, OSError, TimeoutError, msgspec.ValidationError) as error:
                log.debug("vllm metrics: %s", error)
            await asyncio.sleep(LOOK_S)

    async def _follow(self) -> None:
        with zmq.asyncio.Context() as context:
            socket = context.socket(zmq.SUB)
            socket.setsockopt(zmq.RCVHWM, _HWM)
            socket.setsockopt(zmq.LINGER, 0)
            socket.subscribe(EVENT_TOPIC)
            socket.connect(f"ipc://{self._events}")
            try:
                while True:
                    frames = await socket.recv_multipart()
                    if len(frames) == 3 and len(frames[1]) == 8:
                        try:
                            self._blocks.batch(int.from_bytes(frames[1], "big"), frames[2])
                        except KvEventError as error:
                            log.warning("vllm kv events: %s", error)
            finally:
                socket.close()
