"""One job of a vLLM server as the node sees it: what all its workers have said of it, added up over tensor ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from engines.protocol import (
    Exported,
    JobEvent,
    JobFailed,
    Loaded,
    Offered,
    StoreCommand,
    Stored,
)
from engines.stream import ProcessStream
from engines.vllm.messages import Broken, Computed, Dismissed, Ended, Enlisted, FromWorker


class VllmJob:
    """A job's stream of events, and the moments that it waits for.

    Of several ranks the last one counts: what one of them has not exported is not there.
    """

    def __init__(self, name: str, ranks: int, cancel: Callable[[str], None]) -> None:
        self.name = name
        self.stream = ProcessStream(name, cancel)
        self.compute_s = 0.0
        self.tokens = 0
        """Tokens of an export that were computed or held, once it is dismissed."""
        self.enlisted = asyncio.Event()
        self.refusal = ""
        self.computed = asyncio.Event()
        self.loaded = False
        self.ended = asyncio.Event()
        """vLLM is done with it, and whatever is to be offered is offered."""
        self.dismissed = asyncio.Event()
        self.finishing = asyncio.Event()
        """A generation is to end as if it had said an end token."""
        self.reason: str | None = None
        """Why a generation's answer ended."""
        self.broken: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.settled = asyncio.Event()
        """Nothing that was offered waits for the node."""
        self.settled.set()
        self._ranks = ranks
        self._said: dict[object, set[int]] = {}
        self._exported: dict[int, int] = {}
        self._told = 0
        self._waiting: set[int] = set()
        self._written: dict[int, bool] = {}

    def received(self, rank: int, message: FromWorker, size: int) -> None:
        """A worker has said something of this job."""
        match message:
            case Enlisted(refusal=refusal):
                self.refusal = self.refusal or refusal
                if self._all(Enlisted, rank):
                    self.enlisted.set()
            case Exported(next_seq=next_seq):
                self._export(rank, next_seq, size)
            case Computed(compute_s=compute_s):
                self.compute_s = max(self.compute_s, compute_s)
                if self._all(Computed, rank):
                    self.computed.set()
            case Loaded():
                if self._all(Loaded, rank):
                    self.loaded = True
                    self.deliver(message, size)
            case Offered(stop=stop):
                if self._all((Offered, stop), rank):
                    self._waiting.add(stop)
                    self.settled.clear()
                    self.deliver(message, size)
            case Stored(stop=stop, written=written):
                self._written[stop] = self._written.get(stop, True) and written
                if self._all((Stored, stop), rank):
                    self._settle(Stored(self.name, stop, self._written.pop(stop)), size)
            case Ended():
                if self._all(Ended, rank):
                    self.ended.set()
            case Broken(detail=detail):
                if not self.broken.done():
                    self.broken.set_result(detail)
            case Dismissed(tokens=tokens):
                self.tokens = tokens
                if self._all(Dismissed, rank):
                    self.dismissed.set()
            case _:
                pass

    def awaits(self, command: StoreCommand) -> bool:
        """Whether this answers an offer that waits."""
        return command.stop in self._waiting

    def deliver(self, event: JobEvent, size: int = 0) -> None:
        """Say this to whoever reads the job's events."""
        self.stream.deliver(event, size)

    def fail(self, cause: str, detail: str) -> None:
        """End it so."""
        self.deliver(JobFailed(self.name, cause, detail[:500]))

    def _all(self, what: object, rank: int) -> bool:
        """Note that a rank has said this; True when it was the last one."""
        said = self._said.setdefault(what, set())
        said.add(rank)
        return len(said) == self._ranks

    def _export(self, rank: int, next_seq: int, size: int) -> None:
        self._exported[rank] = next_seq
        least = min(self._exported.values()) if len(self._exported) == self._ranks else 0
        if least > self._told:
            self._told = least
            self.deliver(Exported(self.name, least), size)

    def _settle(self, event: Stored, size: int) -> None:
        self._waiting.discard(event.stop)
        self.deliver(event, size)
        if not self._waiting:
            self.settled.set()
