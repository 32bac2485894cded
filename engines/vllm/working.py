"""The worker's side of the connector: jobs that the node has enlisted, copied out of and into vLLM's blocks.

vLLM's thread calls in each step and is never kept waiting but for copies. Commands come on another thread, loads run on
a third. One lock guards the jobs; a load holds it for one layer at a time, so that whoever dismisses a job waits for
one copy at most.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import msgspec

from engines.protocol import Exported, Loaded, Offered, StoreCommand, Stored
from engines.vllm.blocks import LayerBlocks
from engines.vllm.exporting import Export, copy_in
from engines.vllm.memory import PoolMemory
from engines.vllm.messages import Broken, Computed, Dismiss, Dismissed, Ended, Enlist, Enlisted
from engines.vllm.offering import Offering
from engines.vllm.stats import Tally
from engines.vllm.steps import Computing, Ending, Loading, Step
from kvcache.blocks import PageGeometry, PageTable
from kvcache.plan import plan_transfer

logger = logging.getLogger(__name__)

IDLE_WAIT_S = 0.002
"""How long a step that computes nothing waits for a load: vLLM would else spin until it is there."""


@dataclass(slots=True)
class WorkerJob:
    """One enlisted job. ``broken``: nothing more of it is copied."""

    export: Export | None
    load: PageTable | None
    offering: Offering
    began: float | None = None
    compute_s: float | None = None
    broken: bool = False


@dataclass(frozen=True, slots=True)
class Results:
    """Requests, by vLLM's ids: whose blocks may be freed, whose loads are over, and which of those failed."""

    sent: frozenset[str]
    loaded: frozenset[str]
    failed: frozenset[str]


class Working:
    """All jobs of one worker. ``put`` takes messages for the node and never waits."""

    def __init__(
        self,
        geometry: PageGeometry,
        chunk_tokens: int,
        memory: PoolMemory,
        layers: Mapping[str, LayerBlocks],
        put: Callable[[msgspec.Struct], None],
    ) -> None:
        """``layers`` by vLLM's names."""
        self.tally = Tally()
        self._geometry = geometry
        self._chunk_tokens = chunk_tokens
        self._memory = memory
        self._layers = layers
        self._put = put
        self._lock = threading.Lock()
        self._jobs: dict[str, WorkerJob] = {}
        self._steps: list[tuple[Computing, WorkerJob]] = []
        self._idle = False
        self._sent: set[str] = set()
        self._loads: queue.SimpleQueue[Loading] = queue.SimpleQueue()
        self._loading = 0
        self._loaded: set[str] = set()
        self._failed: set[str] = set()
        self._load_over = threading.Condition(self._lock)
        threading.Thread(target=self._load_all, daemon=True, name="prfaas-loads").start()

    # ---- the node's commands, on a thread of their own

    def enlist(self, order: Enlist) -> None:
        """Know a job, if it fits the pool."""
        try:
            job = self._job(order)
        except ValueError as error:
            self._put(Enlisted(order.job, str(error)))
            return
        with self._lock:
            self._jobs[order.job] = job
        self._put(Enlisted(order.job))

    def store(self, command: StoreCommand) -> None:
        """Write what a job has offered, or forget it."""
        with self._lock:
            job = self._jobs.get(command.job)
            offer = None if job is None else job.offering.waiting.pop(command.stop, None)
            if offer is None:
                return
            written = bool(command.pages)
            if written:
                try:
                    self._check_pages(command.pages)
                    offer.write(self._geometry, self._memory, command.pages)
                except Exception:
                    logger.exception("an offer was not stored job=%s", command.job)
                    written = False
        self._put(Stored(command.job, command.stop, written))

    def dismiss(self, order: Dismiss) -> None:
        """Forget a job: whoever copies for it has let go of the lock by now, and finds it gone next time."""
        with self._lock:
            job = self._jobs.pop(order.job, None)
        tokens = job.export.tokens if job is not None and job.export is not None else 0
        self._put(Dismissed(order.job, tokens))

    # ---- vLLM's steps, on vLLM's thread

    def begin_step(self, step: Step) -> None:
        """A step begins: its loads are started, what it ends is copied, what it computes is remembered."""
        self._idle = step.idle
        for loading in step.loading:
            self._start(loading)
        with self._lock:
            for job in step.unneeded:
                if job in self._jobs:
                    self._jobs[job].load = None
                    self._put(Loaded(job))
            for ending in step.ending:
                self._end(ending)
            self._steps = []
            for computing in step.computing:
                known = self._jobs.get(computing.job)
                if known is not None and not known.broken:
                    known.began = time.monotonic() if known.began is None else known.began
                    known.offering.begin_step(computing.begin, computing.end)
                    self._steps.append((computing, known))

    def save_layer(self, name: str) -> None:
        """A layer of the step is computed, and its KV is in vLLM's blocks."""
        layer = self._layers.get(name)
        if layer is None or not self._steps:
            return
        with self._lock:
            for computing, job in self._steps:
                if self._jobs.get(computing.job) is not job or job.broken:
                    continue
                try:
                    job.offering.save(layer, computing.blocks)
                    self._export(computing, job, layer)
                except Exception as error:
                    self._break(computing.job, job, error)

    def end_step(self) -> None:
        """All layers of the step are computed."""
        with self._lock:
            for computing, job in self._steps:
                if self._jobs.get(computing.job) is not job or job.broken:
                    continue
                for each in job.offering.end_step():
                    self._put(Offered(computing.job, each.start, each.stop, each.snapshot))
                if job.compute_s is not None:  # behind all that is offered: who hears this has heard of that
                    self._put(Computed(computing.job, job.compute_s))
                    job.compute_s = None
            self._steps = []

    def results(self) -> Results:
        """What became of requests since the last call. A step without work waits a little for loads under way."""
        with self._load_over:
            if self._idle and self._loading and not self._loaded:
                self._load_over.wait(IDLE_WAIT_S)
            found = Results(frozenset(self._sent), frozenset(self._loaded), frozenset(self._failed))
            self._sent, self._loaded, self._failed = set(), set(), set()
        return found

    # ---- inside; the lock is held but where it says otherwise

    def _job(self, order: Enlist) -> WorkerJob:
        """Raises ValueError. Without the lock: a long prompt's plan takes a while."""
        export = load = None
        if order.stop:
            plan = plan_transfer(self._geometry.layout, order.start, order.stop, self._chunk_tokens)
            export = Export(plan, self._table(order.start, order.stop, order.pages), self._memory, order.held)
        if order.load:
            load = self._table(0, order.load, order.load_pages)
        return WorkerJob(export, load, Offering(self._geometry, order.checkpoints, order.keep_from))

    def _table(self, start: int, stop: int, pages: tuple[int, ...]) -> PageTable:
        self._check_pages(pages)
        return self._geometry.table(start, stop, pages)

    def _check_pages(self, pages: tuple[int, ...]) -> None:
        if min(pages, default=0) < 0 or max(pages, default=0) >= self._memory.pages:
            raise ValueError(f"pages: one is outside the pool of {self._memory.pages}")

    def _export(self, computing: Computing, job: WorkerJob, layer: LayerBlocks) -> None:
        export = job.export
        if export is None or export.complete:
            return
        before = export.ready
        export.save(layer, computing.blocks, computing.end)
        if not export.advance():
            return
        self._put(Exported(computing.job, export.ready))
        self.tally.exported(export.bytes_between(before, export.ready))
        if export.complete:
            assert job.began is not None
            job.compute_s = time.monotonic() - job.began

    def _end(self, ending: Ending) -> None:
        """Offer what a request leaves behind; its blocks are free as soon as that is copied."""
        if ending.blocks is not None:
            self._sent.add(ending.request)
        job = self._jobs.get(ending.job)
        if job is None:
            return
        if ending.blocks is not None and not job.broken:
            try:
                left = job.offering.end(self._layers.values(), ending.blocks, ending.tokens)
            except Exception as error:
                self._break(ending.job, job, error)
            else:
                if left is not None:
                    self._put(Offered(ending.job, left.start, left.stop, left.snapshot))
        self._put(Ended(ending.job))

    def _break(self, name: str, job: WorkerJob, error: Exception) -> None:
        """One job went wrong; vLLM and all others go on."""
        logger.error("job broken job=%s", name, exc_info=error)
        job.broken = True
        self.tally.broken()
        self._put(Broken(name, f"{type(error).__name__}: {error}"))

    # ---- loads, on a thread of their own

    def _start(self, loading: Loading) -> None:
        with self._lock:
            self._loading += 1
        self._loads.put(loading)

    def _load_all(self) -> None:
        while True:
            loading = self._loads.get()
            began = time.monotonic()
            failure = "the node has not enlisted this job, or has dismissed it"
            try:
                done = self._load(loading)
            except Exception as error:
                logger.exception("load failed job=%s", loading.job)
                done, failure = False, f"{type(error).__name__}: {error}"
            with self._load_over:
                self._loading -= 1
                self._loaded.add(loading.request)
                if not done:
                    self._failed.add(loading.request)
                self._load_over.notify()
            self.tally.loaded(done, loading.end - loading.begin, time.monotonic() - began)
            self._put(Loaded(loading.job) if done else Broken(loading.job, failure))

    def _load(self, loading: Loading) -> bool:
        """Copy all layers in; False where the job is not known, or was dismissed on the way."""
        for layer in self._layers.values():
            with self._lock:
                job = self._jobs.get(loading.job)
                table = None if job is None else job.load
                if table is None or table.stop != loading.end:
                    return False
                copy_in(layer, loading.blocks[layer.place.blocks], table, self._memory, loading.begin)
        with self._lock:
            known = self._jobs.get(loading.job)
            if known is not None:
                known.load = None
        return True
