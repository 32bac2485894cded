"""Engines that run in pods, found by label: those that Kubernetes calls ready, at their pods' addresses.

The API server is asked every few seconds, with the gateway's service account, which needs the verb ``list`` on pods.
While it does not answer, the engines that it told of last stay: whether they live is for their health to say.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from pathlib import Path

import httpx
import msgspec

from gateway.fleet.config import EngineConfig, PodEngines

log = logging.getLogger(__name__)

LOOK_EVERY_S = 5.0
MOST_PODS = 4096
PAGE = 500


class _Condition(msgspec.Struct, frozen=True):
    type: str
    status: str


class _Status(msgspec.Struct, frozen=True, rename="camel"):
    phase: str = ""
    pod_ip: str = msgspec.field(default="", name="podIP")
    conditions: tuple[_Condition, ...] = ()


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    deletion_timestamp: str | None = None


class _Pod(msgspec.Struct, frozen=True):
    metadata: _Metadata
    status: _Status = _Status()

    @property
    def ready(self) -> bool:
        ready = any(each.type == "Ready" and each.status == "True" for each in self.status.conditions)
        going = self.metadata.deletion_timestamp is not None
        return ready and not going and self.status.phase == "Running" and bool(self.status.pod_ip)


class _More(msgspec.Struct, frozen=True):
    continue_: str = msgspec.field(default="", name="continue")


class _Pods(msgspec.Struct, frozen=True):
    items: tuple[_Pod, ...]
    metadata: _More = _More()


class PodWatch:
    """Asks until stopped; ``changed`` is called with all engines found whenever these are others than before."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        account: Path,
        selectors: Sequence[PodEngines],
        changed: Callable[[tuple[EngineConfig, ...]], None],
        every_s: float = LOOK_EVERY_S,
    ) -> None:
        """``account`` is the folder of the service account; ``http`` speaks to the API server and is closed here."""
        self.found: tuple[EngineConfig, ...] = ()
        self._http = http
        self._account = account
        self._selectors = tuple(selectors)
        self._changed = changed
        self._every_s = every_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin; there must be a running loop."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End. Idempotent."""
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._http.aclose()

    async def look(self) -> None:
        """Ask once. Raises httpx.HTTPError, OSError or ValueError, and then changes nothing."""
        found: dict[str, EngineConfig] = {}
        for selector in self._selectors:
            async for pod in self._pods(selector):
                found.setdefault(pod.metadata.name, selector.engine(pod.metadata.name, pod.status.pod_ip))
        engines = tuple(found[name] for name in sorted(found))
        if engines != self.found:
            self.found = engines
            self._changed(engines)

    async def _run(self) -> None:
        failing = False
        while True:
            try:
                await self.look()
            except (httpx.HTTPError, OSError, ValueError) as error:
                if not failing:
                    log.warning("pods cannot be listed cause=%r; the engines found last stay", str(error))
                failing = True
            else:
                failing = False
            await asyncio.sleep(self._every_s)

    async def _pods(self, selector: PodEngines) -> AsyncIterator[_Pod]:
        namespace = selector.namespace or (self._account / "namespace").read_text(encoding="ascii").strip()
        query: Mapping[str, str] = {"labelSelector": selector.labels, "limit": str(PAGE)}
        seen, more = 0, ""
        while True:
            # read anew each time: the kubelet rotates it
            token = (self._account / "token").read_text(encoding="ascii").strip()
            answer = await self._http.get(
                f"/api/v1/namespaces/{namespace}/pods",
                params={**query, **({"continue": more} if more else {})},
                headers={"Authorization": f"Bearer {token}"},
            )
            answer.raise_for_status()
            page = msgspec.json.decode(answer.content, type=_Pods)
            for pod in _ready(page.items):
                yield pod
            seen, more = seen + len(page.items), page.metadata.continue_
            if not more or seen >= MOST_PODS:
                return


def _ready(pods: Sequence[_Pod]) -> Iterator[_Pod]:
    return (pod for pod in pods if pod.ready)
