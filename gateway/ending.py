"""How a request ends: what its client is told where it failed, and what is counted whatever became of it."""

from __future__ import annotations

import asyncio
import logging
from types import TracebackType
from typing import Any, Protocol, Self

from gateway.admission import Pass
from gateway.caller import Caller
from gateway.errors import ApiError
from gateway.metrics import Metrics
from gateway.request_record import Recorded

log = logging.getLogger(__name__)

READ_GRACE_S = 5.0
"""How long after its deadline an answer that is ready may still wait for a client that does not read."""


class Life(Protocol):
    """What is done for one request, by whatever way."""

    @property
    def record(self) -> Recorded[Any]:
        """What is kept of it."""

    def close(self, outcome: str) -> None:
        """Let go of everything and keep the record. Idempotent."""


class Ending:
    """Of one request, around all that is done for it. ``life`` is set once there is one.

    Only a cancellation passes: the client has gone, or the gateway ends.
    """

    def __init__(self, caller: Caller, admitted: Pass, metrics: Metrics) -> None:
        self.life: Life | None = None
        self._caller = caller
        self._admitted = admitted
        self._metrics = metrics

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        outcome, passes = "failed", False
        try:
            if isinstance(error, ApiError):
                self._caller.refuse(error)
            elif isinstance(error, TimeoutError):
                outcome = "slow_client"
                log.warning("client does not read client_id=%s", self._caller.request_id)
                self._caller.drop()
            elif isinstance(error, Exception):
                log.error("request broke client_id=%s", self._caller.request_id, exc_info=error)
                self._caller.refuse(ApiError(500, "internal error", code="internal_error"))
            elif error is not None:
                passes = True
                outcome = "disconnected" if isinstance(error, asyncio.CancelledError) else outcome
        finally:
            if self.life is not None:
                self._close(self.life, outcome)
        return not passes

    def _close(self, life: Life, outcome: str) -> None:
        life.close(outcome)
        record, done = life.record, life.record.finished
        self._admitted.end(record.spoken, done is not None, asyncio.get_running_loop().time())
        if done is None:
            return
        usage = {"input_tokens": done.prompt_tokens, "output_tokens": done.completion_tokens}
        self._caller.span.note({f"gen_ai.usage.{name}": count for name, count in usage.items()})
        self._metrics.prompt_tokens.inc(done.prompt_tokens)
        self._metrics.generation_tokens.inc(done.completion_tokens)
        self._metrics.cached_tokens.inc(done.cached_tokens)
