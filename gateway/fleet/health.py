"""Whether engines are well: asked every few seconds, all at once, so that a dead one keeps nobody from being asked."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import msgspec

from gateway.fleet.config import DialectName, EngineRole
from gateway.fleet.engine import Engine
from gateway.fleet.fleet import Fleet
from gateway.upstream.errors import Cause, UpstreamError
from gateway.upstream.pool import Pool

log = logging.getLogger(__name__)

EVERY_S = 2.0
FIRST_S = 2.0
"""How long a gateway that starts waits for the first look; whoever it takes over from serves meanwhile."""
PATIENCE_S = 5.0
"""For SGLang's, which generate to say that they are well."""
MODELS_EVERY = 15
"""Of so many checks that went well one looks at the model's name again."""
SLOW_CHECKS = 2
"""So many that time out in a row make it unwell: it may only be busy."""
MAX_BYTES = 4 << 20
_AT_ONCE = 64


class Unwell(Exception):
    """Why, for an operator."""


class HealthWatch:
    """``start`` on the event loop, ``stop`` in any case."""

    def __init__(self, fleet: Fleet, pool: Pool) -> None:
        self._fleet = fleet
        self._pool = pool
        self._task: asyncio.Task[None] | None = None
        self._now = asyncio.Event()
        self._looked = asyncio.Event()
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._well: dict[Engine, int] = {}
        self._slow: dict[Engine, int] = {}

    def start(self) -> None:
        """Begin."""
        self._task = asyncio.create_task(self._run())

    async def first(self) -> None:
        """Return when all were asked once, soon in any case: until then nobody knows one that is well."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FIRST_S):
                await self._looked.wait()

    async def stop(self) -> None:
        """End. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    def look_now(self) -> None:
        """Something failed, or is new: do not wait for the next time."""
        self._now.set()

    async def check(self) -> None:
        """Ask all of them once."""
        engines = self._fleet.engines
        for known in (self._well, self._slow):
            for gone in known.keys() - set(engines):
                del known[gone]
        await asyncio.gather(*(self._check(engine) for engine in engines))

    async def _run(self) -> None:
        while True:
            self._now.clear()
            try:
                await self.check()
            except Exception:
                log.exception("a look at the engines broke")
            self._looked.set()
            try:
                async with asyncio.timeout(EVERY_S):
                    await self._now.wait()
                await asyncio.sleep(EVERY_S / 10)  # one failure after the other must not make it a loop
            except TimeoutError:
                continue

    async def _check(self, engine: Engine) -> None:
        async with self._room:
            try:
                async with asyncio.timeout(PATIENCE_S):
                    await self._ask(engine)
            except TimeoutError:
                self._slow[engine] = self._slow.get(engine, 0) + 1
                if self._slow[engine] >= SLOW_CHECKS or engine.trouble is not None:
                    self._say(engine, f"no answer within {PATIENCE_S:g} s")
            except Unwell as error:
                self._say(engine, str(error))
            else:
                self._slow.pop(engine, None)
                self._say(engine, None)

    def _say(self, engine: Engine, trouble: str | None) -> None:
        if trouble is not None:
            self._well.pop(engine, None)
        if trouble != engine.trouble:
            log.warning("engine name=%s %s", engine.name, "is well" if trouble is None else f"unwell: {trouble}")
            engine.trouble = trouble

    async def _ask(self, engine: Engine) -> None:
        """Raises Unwell."""
        config, well = engine.config, self._well.get(engine, 0)
        status, _ = await self._get(engine, config.url + "/health")
        if status not in (200, 404):  # a server of this API need not have the path
            raise Unwell(f"/health answers {status}")
        if status == 404 or well % MODELS_EVERY == 0:
            await self._check_model(engine)
        if config.dialect is DialectName.VLLM_MOONCAKE and config.role is not EngineRole.DECODE:
            engine.engine_ids = await self._engine_ids(engine)
        self._well[engine] = well + 1

    async def _check_model(self, engine: Engine) -> None:
        status, body = await self._get(engine, engine.config.url + "/v1/models")
        if status != 200:
            raise Unwell(f"/v1/models answers {status}")
        names = [one.get("id") for one in _list(body.get("data")) if isinstance(one, dict)]
        if engine.config.model not in names:
            served = ", ".join(str(name)[:80] for name in names[:5]) or "nothing"
            raise Unwell(f"it serves {served}, not {engine.config.model!r}: correct model in the file of engines")

    async def _engine_ids(self, engine: Engine) -> dict[int, str]:
        """Of each rank, as the bootstrap server of a prefill engine says now: another process has others."""
        status, body = await self._get(engine, f"http://{engine.config.bootstrap}/query")
        found = {
            int(rank): one["engine_id"]
            for rank, one in body.items()
            if rank.isdigit() and isinstance(one, dict) and isinstance(one.get("engine_id"), str)
        }
        missing = next((rank for rank in range(engine.config.ranks) if rank not in found), None)
        if status != 200 or missing is not None:
            raise Unwell(f"the bootstrap server {engine.config.bootstrap} answers {status} and knows no rank {missing}")
        return found

    async def _get(self, engine: Engine, url: str) -> tuple[int, dict[str, Any]]:
        """Status and JSON object, an empty one for any other body. Raises Unwell."""
        key = engine.config.key
        own = key is not None and url.startswith(engine.config.url + "/")
        headers = [(b"authorization", b"Bearer " + key.encode())] if own and key is not None else []
        try:
            async with await self._pool.request("GET", url, headers, deadline_s=PATIENCE_S) as response:
                data = await response.read(MAX_BYTES)
        except UpstreamError as error:
            if error.cause is Cause.DEADLINE:
                raise TimeoutError from error
            raise Unwell(str(error)) from error
        try:
            found = msgspec.json.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            found = None
        return response.status, found if isinstance(found, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
