"""Both sides of a transfer as one: a node holds both whatever its role is, and a gateway's jobs may be on either."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from decode_client.client import DecodeClient
from kvcache.control import FromNode
from prefill_service.service import PrefillService


@dataclass(frozen=True, slots=True)
class Sides:
    """What serves KV and what asks for it."""

    serving: PrefillService
    asking: DecodeClient

    @property
    def queued_jobs(self) -> int:
        """Jobs that wait for room, or for their KV."""
        return self.serving.queued_jobs + self.asking.queued_jobs

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens that are still to be computed."""
        return self.serving.queued_tokens + self.asking.queued_tokens

    @property
    def running(self) -> int:
        """Jobs and answers that the engine holds."""
        return self.serving.running + self.asking.running

    @property
    def open_transfers(self) -> int:
        """Transfers that are not over."""
        return self.serving.open_transfers + self.asking.open_transfers

    def at_hand(self, but: str) -> tuple[int, int]:
        """Jobs of all gateways but this one, and what is still to be computed of them, in tokens."""
        jobs, tokens = zip(self.serving.at_hand(but), self.asking.at_hand(but), strict=True)
        return sum(jobs), sum(tokens)

    def trust(self, ticket_key: bytes, gateway: str, report: Callable[[FromNode], None]) -> None:
        """Tickets of this gateway are signed with this key from now on, and ``report`` tells it of its jobs."""
        self.serving.trust(ticket_key, gateway, report)
        self.asking.trust(ticket_key, gateway, report)

    def cancel(self, job: str) -> bool:
        """End a job; Cancelled is reported when it holds nothing. False where no such job is at hand."""
        return self.serving.cancel(job) or self.asking.cancel(job)

    def leave(self, gateway: str, cause: str, detail: str) -> None:
        """A gateway is gone: its jobs end, and its tickets are worth nothing until it is trusted anew."""
        self.serving.leave(gateway, cause, detail)
        self.asking.leave(gateway, cause, detail)

    async def settled(self) -> None:
        """Return when no job is at hand on either side."""
        await self.serving.settled()
        await self.asking.settled()

    async def close(self) -> None:
        """End everything and wait until nothing is held. Idempotent."""
        await self.serving.close()
        await self.asking.close()
