"""The one way to Redis: every call has a deadline and none is made twice, so whoever waits knows soon.

Calls are made by tasks in the background and by operators' requests, never by a client's request on its way. A Redis
that is slow, stopped or gone makes calls fail; nothing else waits for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from gateway.shared.settings import RedisSettings

log = logging.getLogger(__name__)

CALL_S = 1.0
"""How long one call may take; a beat that takes longer is no beat."""
MOST_CONNECTIONS = 8


class RedisAway(Exception):
    """Redis did not answer a call, or not as it should. The text holds no secret."""


class RedisLink:
    """Calls scripts and commands. ``up`` is whether the last call was answered."""

    def __init__(self, settings: RedisSettings) -> None:
        self.where = settings.where
        self.up = False
        self.why = "it was not asked yet"
        self.failed = 0
        """Calls that were not answered."""
        self._prefix = settings.prefix
        security: dict[str, Any] = {"ssl": True, "ssl_check_hostname": True} if settings.tls else {}
        if settings.ca is not None:
            security["ssl_ca_certs"] = str(settings.ca)
        self._client = Redis(
            host=settings.host,
            port=settings.port,
            db=settings.database,
            username=settings.username,
            password=settings.password,
            socket_timeout=CALL_S,
            socket_connect_timeout=CALL_S,
            retry=Retry(NoBackoff(), 0),
            max_connections=MOST_CONNECTIONS,
            client_name="prfaas",
            **security,
        )

    def key(self, *parts: str) -> str:
        """A key under the prefix; the braces keep all of them on one shard of a cluster."""
        return ":".join((f"{{{self._prefix}}}", *parts))

    async def script(self, text: str, keys: Sequence[str], values: Sequence[str | bytes | int | float]) -> Any:
        """Run a script. Raises RedisAway."""
        return await self._answer(self._client.register_script(text)(keys=list(keys), args=list(values)))

    async def command(self, *words: str | bytes | int | float) -> Any:
        """Run one command. Raises RedisAway."""
        client: Any = self._client  # its annotations know only what each command's own method takes
        return await self._answer(client.execute_command(*words))

    async def together(self, *commands: Sequence[str | bytes | int | float]) -> list[Any]:
        """Run commands in one step. Raises RedisAway."""
        pipeline: Any = self._client.pipeline(transaction=True)
        for words in commands:
            pipeline.execute_command(*words)
        found: list[Any] = await self._answer(pipeline.execute())
        return found

    async def close(self) -> None:
        """Let go of the connections. Idempotent."""
        with contextlib.suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(CALL_S):
                await self._client.aclose()

    async def _answer(self, call: Any) -> Any:
        try:
            async with asyncio.timeout(CALL_S):
                found = await _cancellable(call)
        except (RedisError, OSError, TimeoutError, ValueError) as error:
            self.failed += 1
            self._is(False, f"{type(error).__name__}: {' '.join(str(error).split())[:200] or 'no answer in time'}")
            raise RedisAway(f"Redis at {self.where}: {self.why}") from error
        self._is(True, "")
        return found

    def _is(self, up: bool, why: str) -> None:
        if up != self.up:
            log.log(logging.INFO if up else logging.WARNING, "redis %s up=%s %s", self.where, up, why)
        self.up, self.why = up, why


async def _cancellable(call: Any) -> Any:
    """The call's answer. Whoever is cancelled meanwhile ends, whatever the client library makes of it.

    It makes an error of a cancellation that meets a connection's end; a gateway that is to stop would wait for ever for
    the task that went on.
    """
    task = asyncio.current_task()
    assert task is not None
    before = task.cancelling()
    try:
        return await call
    finally:
        if task.cancelling() > before:
            raise asyncio.CancelledError
