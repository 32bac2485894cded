"""Health by a real generation: a tiny request through every node that has proved nothing of late, while it is idle.

What users' requests prove needs no canary, so where there is traffic there is none. A canary counts for the circuit
breakers as any request does: it opens one before a user meets the fault, and is what a half-open one lets through, so
that no user's request has to be the trial.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from prometheus_client import Counter, Histogram

from gateway.breakers import Trial
from gateway.clusters import ClusterState
from gateway.failures import AttemptFailed
from gateway.registry import Registry
from gateway.samples import Samples, see_through
from gateway.sessions import NodeSession
from kvcache.background import in_background
from kvcache.wire import Role
from scheduler.breaker import BreakerState

log = logging.getLogger(__name__)

LOOK_EVERY_S = 0.5
DEADLINE_S = 10.0
LAST = 1 << 62
"""After everybody else in the queues of nodes."""
FRESH_S = 1.0
"""A proof that is no older answers ``/health_generate``, however many ask."""


class NotHealthy(Exception):
    """No answer can be generated; the text says why."""


class Canary:
    """``start`` and ``stop`` with the gateway. ``every_s`` says how long a node may prove nothing; 0: no canaries."""

    def __init__(self, registry: Registry, samples: Samples, every_s: Callable[[], float]) -> None:
        self._registry = registry
        self._samples = samples
        self._every_s = every_s
        self._running: dict[str, asyncio.Task[None]] = {}
        self._loop: asyncio.Task[None] | None = None
        self._asked: asyncio.Task[None] | None = None
        self.outcomes = Counter("prfaas_canary", "Generations that test nodes", ["outcome"], registry=None)
        self.seconds = Histogram("prfaas_canary_seconds", "Of those that succeeded", registry=None)

    def start(self) -> None:
        """Look after the nodes from now on."""
        self._loop = in_background(self._look(), log, "canaries broke: nodes that are idle are not tried any more")

    async def stop(self) -> None:
        """End every canary. Idempotent."""
        tasks = [task for task in (self._loop, self._asked, *self._running.values()) if task is not None]
        self._loop = self._asked = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def missing_proof(self) -> str | None:
        """Why no answer should be expected now, judged by what was generated; None where nothing speaks against it."""
        decoders = [node for node in self._registry.nodes(self._registry.local_cluster, Role.DECODE) if node.accepting]
        breakers = [self._registry.breakers.node(node) for node in decoders]
        if not breakers:
            return None
        now = asyncio.get_running_loop().time()
        if all(breaker.state(now) is not BreakerState.CLOSED for breaker in breakers):
            return "the circuit breaker of every decode node is open"
        if self._every_s() and all(breaker.proved_at is None for breaker in breakers):
            return "no decode node has generated anything yet"
        return None

    async def generate(self) -> None:
        """Return when an answer has just been generated, at most one at a time whoever asks. Raises NotHealthy."""
        now = asyncio.get_running_loop().time()
        decoders = [node for node in self._registry.nodes(self._registry.local_cluster, Role.DECODE) if node.accepting]
        proofs = [self._registry.breakers.node(node).proved_at for node in decoders]
        if any(proved is not None and now - proved <= FRESH_S for proved in proofs):
            return
        if not decoders:
            raise NotHealthy("no decode node accepts work")
        if self._asked is None or self._asked.done():
            least = min(decoders, key=lambda node: (len(node.jobs), node.node_id))
            self._asked = asyncio.create_task(self._generate(least))
            self._asked.add_done_callback(_heard)
        await asyncio.shield(self._asked)

    async def _generate(self, decode: NodeSession) -> None:
        local = self._registry.nodes(self._registry.local_cluster, Role.PREFILL)
        prefill = next((node for node in local if node.accepting and not node.jobs), None)
        failure = await self._try(prefill, decode)
        if failure is not None:
            raise NotHealthy(f"a generation on {decode.node_id} failed: {failure.stage}: {failure.cause}")

    async def _look(self) -> None:
        while True:
            every = self._every_s()
            if every:
                now = asyncio.get_running_loop().time()
                for node in self._registry.nodes():
                    if node.node_id not in self._running and self._due(node, now, every):
                        self._begin(node)
            await asyncio.sleep(LOOK_EVERY_S)

    def _due(self, node: NodeSession, now: float, every_s: float) -> bool:
        """Whether it is idle, in use, and has proved nothing for that long or is to be tried again."""
        beat = node.heartbeat
        if not node.accepting or node.jobs or beat is None or beat.queued_jobs or beat.running:
            return False
        cluster = self._registry.cluster(node.join.cluster)
        if cluster.state is not ClusterState.ACTIVE:
            return False
        breakers = [self._registry.breakers.node(node)]
        if not cluster.local:
            breakers.append(self._registry.breakers.cluster(cluster.name))
        if not all(breaker.admits(now) for breaker in breakers):
            return False
        trial = any(breaker.state(now) is BreakerState.HALF_OPEN for breaker in breakers)
        proved = breakers[0].proved_at
        return trial or proved is None or now - proved >= every_s

    def _begin(self, node: NodeSession) -> None:
        prefill, decode = (None, node) if node.join.role is Role.DECODE else (node, self._partner())
        if decode is None:
            return
        task = self._running[node.node_id] = asyncio.create_task(self._watch(prefill, decode))
        task.add_done_callback(lambda _: self._running.pop(node.node_id, None))

    def _partner(self) -> NodeSession | None:
        decoders = self._registry.nodes(self._registry.local_cluster, Role.DECODE)
        free = [node for node in decoders if node.accepting and node.free_slots > 1]
        return min(free, key=lambda node: (len(node.jobs), node.node_id), default=None)

    async def _watch(self, prefill: NodeSession | None, decode: NodeSession) -> None:
        """One canary; a node that fails it is left alone for a while before the next."""
        failure = await self._try(prefill, decode)
        if failure is not None:
            await asyncio.sleep(min(self._every_s(), DEADLINE_S))

    async def _try(self, prefill: NodeSession | None, decode: NodeSession) -> AttemptFailed | None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        attempt = self._samples.attempt("canary", prefill, decode, DEADLINE_S, LAST)
        trial = Trial(self._registry.breakers, attempt, self._registry.local_cluster, began)
        try:
            async with asyncio.timeout(DEADLINE_S):
                await see_through(attempt, DEADLINE_S)
        except (AttemptFailed, TimeoutError) as error:
            late = AttemptFailed("wait", "late", f"no answer within {DEADLINE_S:g} s")
            failure = error if isinstance(error, AttemptFailed) else late
            trial.failed(failure, loop.time())
            self.outcomes.labels("failed").inc()
            log.warning("canary failed prefill=%s decode=%s %s", prefill and prefill.node_id, decode.node_id, failure)
            return failure
        else:
            trial.end(True, loop.time())
        finally:
            trial.end(False, loop.time())  # the gateway ends: it says nothing
        self.outcomes.labels("ok").inc()
        self.seconds.observe(loop.time() - began)
        return None


def _heard(task: asyncio.Task[None]) -> None:
    """Whoever waited may be gone: the outcome has been looked at all the same."""
    with contextlib.suppress(asyncio.CancelledError):
        task.exception()
