"""A vLLM server as an engine of its node: jobs become requests, whose KV goes through the node's pool.

Pages are safe by one rule: a job's stream ends only when every worker has answered a Dismiss, after which none of them
touches its pages, whatever vLLM still does with the request.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Callable, Coroutine
from typing import Any

import aiohttp

from engines.protocol import (
    EngineInfo,
    EngineLost,
    GenerateCommand,
    GenerationFinished,
    JobCancelled,
    JobFailed,
    Loading,
    PrefillCommand,
    PrefillFinished,
    Pulse,
    StoreCommand,
)
from engines.stream import ProcessStream
from engines.vllm.api import RequestRefused, VllmApi
from engines.vllm.figures import Watch
from engines.vllm.jobs import VllmJob
from engines.vllm.messages import Dismiss, FromWorker, PoolInfo
from engines.vllm.process import VllmProcess, api_socket, event_socket, is_stopped, private_directory, worker_socket
from engines.vllm.requests import Requests
from engines.vllm.spec import VllmSpec
from engines.vllm.trial import measure
from engines.vllm.workers import Workers
from kvcache.engine_figures import EngineFigures
from kvcache.hostpool import HostPool
from kvcache.layout_configs import read_config

log = logging.getLogger(__name__)

TICK_S = 0.5
SILENT_TICKS = 8
HEALTH_S = 4.0
HUNG_S = 30.0
"""How long a server may say nothing while its processes are not stopped: on a crowded machine it is slow, not gone."""
STATUS_S = 0.3
"""How long it may take until a server whose socket closed is seen to have ended."""


class VllmEngine:
    """See the module (implements ``engines.protocol.Engine``)."""

    def __init__(self, spec: VllmSpec, process: VllmProcess, api: VllmApi, watch: Watch) -> None:
        """Use ``start``."""
        self._spec = spec
        self._process = process
        self._api = api
        self._watch = watch
        self._requests = Requests(api, lambda message: self._connected.send(message))
        self._workers: Workers | None = None
        self._info: EngineInfo | None = None
        self._jobs: dict[str, VllmJob] = {}
        self._work: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._heard = True
        self._burying: asyncio.Task[None] | None = None
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    @classmethod
    async def start(
        cls, spec: VllmSpec, pool: HostPool, on_loading: Callable[[Loading], None] | None = None
    ) -> VllmEngine:
        """Start a server, wait until its workers have mapped ``pool`` and its API answers, and try it out.

        Raises EngineLost, with what vLLM said last, where it refuses the model or takes longer than the spec allows.
        """
        tell = on_loading or (lambda loading: None)
        directory = private_directory()
        try:
            process = await VllmProcess.start(spec, directory)
        except OSError as error:
            shutil.rmtree(directory, ignore_errors=True)
            raise EngineLost(f"vLLM does not start: {error}; is --engine-python the Python of its venv?") from error
        api = VllmApi(api_socket(directory))
        engine = cls(spec, process, api, Watch(api, event_socket(directory)))
        info = PoolInfo(pool.page_bytes, pool.pages, spec.block_tokens, spec.chunk_tokens, spec.layout)
        engine._workers = Workers(worker_socket(directory), pool, info, engine._received, engine._bury)
        engine._run(engine._watch_exit())
        try:
            async with asyncio.timeout(spec.start_s):
                tell(Loading("vllm", 0.0))
                await engine._unless_lost(engine._workers.complete())
                tell(Loading("api", 0.5))
                await engine._unless_lost(engine._api.answering())
                tell(Loading("trial", 0.8))
                await engine._unless_lost(engine._try_out())
        except TimeoutError:
            await engine.close()
            raise EngineLost(f"vLLM not ready after {spec.start_s:.0f} s: {process.last_words()}") from None
        except BaseException:
            await engine.close()
            raise
        engine._run(engine._watch_silence())
        engine._run(engine._watch_health())
        engine._run(engine._watch.run())
        return engine

    @property
    def info(self) -> EngineInfo:
        """What was loaded."""
        assert self._info is not None
        return self._info

    @property
    def figures(self) -> EngineFigures:
        """What the server says of itself (implements ``engines.protocol.TellsFigures``)."""
        return self._watch.figures

    @property
    def pid(self) -> int:
        """The process id of the API server, which leads a session of its own."""
        return self._process.pid

    def submit(self, command: PrefillCommand | GenerateCommand) -> ProcessStream:
        """Start a job at once. Raises ValueError where a job of that name still runs."""
        name = command.job
        if name in self._jobs:
            raise ValueError(f"job {name!r} is still running")
        job = VllmJob(name, self._connected.ranks, self._stop)
        if self._lost.done():
            job.stream.lose(self._lost.result())
        elif len(self._jobs) >= self._spec.max_jobs:
            job.fail("queue_full", f"the engine holds {self._spec.max_jobs} jobs")
        else:
            self._jobs[name] = job
            self._work[name] = asyncio.create_task(self._requests.run(job, command))
            self._run(self._serve(job, self._work[name]))
        return job.stream

    def store(self, command: StoreCommand) -> None:
        """Answer an offer of a job. Nothing happens where the job is over."""
        job = self._jobs.get(command.job)
        if job is not None and job.awaits(command) and not self._lost.done():
            self._connected.send(command)

    def finish(self, job: str) -> None:
        """End a generation as an end token would. Nothing happens where it is over."""
        known = self._jobs.get(job)
        if known is not None:
            known.finishing.set()

    async def cancel(self, job: str) -> None:
        """Ask the job to end; its stream then ends with JobCancelled. Unknown jobs are ignored."""
        self._stop(job)

    async def wait_lost(self) -> str:
        """Return, with the cause, when the server is dead."""
        return await asyncio.shield(self._lost)

    async def close(self) -> None:
        """End the server and wait for it; streams that still run raise EngineLost. Idempotent."""
        self._bury("closed", gently=not self._lost.done())
        assert self._burying is not None
        await asyncio.shield(self._burying)
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- jobs

    async def _serve(self, job: VllmJob, work: asyncio.Task[None]) -> None:
        """Run a job to its end, have the workers let go of it, and only then say how it ended."""
        terminal: JobFailed | JobCancelled | PrefillFinished | GenerationFinished
        broken = asyncio.ensure_future(job.broken)
        await asyncio.wait((work, broken), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            work.cancel()
            await asyncio.wait((work,))
        cause, detail = "engine_error", ""
        try:
            work.result()
        except asyncio.CancelledError:
            detail = job.broken.result() if job.broken.done() else ""
        except RequestRefused as refused:
            cause, detail = refused.cause, str(refused)
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            detail = f"{type(error).__name__}: {error}"
            if not await self._api.healthy(HEALTH_S):
                self._bury("vLLM broke off an answer and gives no other")
        except Exception as error:
            log.exception("job failed job=%s", job.name)
            detail = f"{type(error).__name__}"
        if self._burying is not None:
            return  # its stream says that the engine is lost, once it is dead
        self._connected.send(Dismiss(job.name))
        await job.dismissed.wait()
        del self._jobs[job.name], self._work[job.name]
        if detail:
            terminal = JobFailed(job.name, cause, detail[:500])
        elif work.cancelled():
            terminal = JobCancelled(job.name, job.tokens)
        elif job.reason is None:
            terminal = PrefillFinished(job.name, job.compute_s)
        else:
            terminal = GenerationFinished(job.name, job.reason)
        job.deliver(terminal)

    def _stop(self, name: str) -> None:
        work = self._work.get(name)
        if work is not None:
            work.cancel()

    # ---- the server

    @property
    def _connected(self) -> Workers:
        assert self._workers is not None
        return self._workers

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _received(self, rank: int, message: FromWorker, size: int) -> None:
        self._heard = True
        if not isinstance(message, Pulse):
            job = self._jobs.get(getattr(message, "job", ""))
            if job is not None:
                job.received(rank, message, size)

    async def _try_out(self) -> None:
        config = read_config(self._spec.model_dir)
        text = config.get("text_config") or config
        vocab = int(text["vocab_size"])
        context = await self._api.context_tokens()
        rates = await measure(self._api, vocab, min(self._spec.chunk_tokens, context // 2))
        self._info = EngineInfo(
            architecture=str(config.get("model_type")),
            dtype=str(self._spec.dtype),
            context_tokens=context,
            vocab_size=vocab,
            chunk_tokens=self._spec.chunk_tokens,
            prefill_tokens_per_s=rates.prefill,
            decode_tokens_per_s=rates.decode,
        )

    async def _unless_lost(self, work: Coroutine[Any, Any, None]) -> None:
        """Do this. Raises EngineLost as soon as the server is lost."""
        task = asyncio.create_task(work)
        try:
            await asyncio.wait((task, self._lost), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise EngineLost(self._lost.result())
            try:
                task.result()
            except (RequestRefused, aiohttp.ClientError, OSError) as error:
                raise EngineLost(f"vLLM does not serve: {error}") from error
        finally:
            task.cancel()

    async def _watch_exit(self) -> None:
        await self._process.status(None)
        self._bury("the server is gone")

    async def _watch_silence(self) -> None:
        """Workers pulse from a thread of their own, busy or not. Ticks are counted: our own stalls prove nothing."""
        silent = 0
        while silent < SILENT_TICKS or not self._gone(silent * TICK_S):
            await asyncio.sleep(TICK_S)
            silent = 0 if self._heard else silent + 1
            self._heard = False
        self._bury(f"vLLM's workers are silent for {silent * TICK_S:.0f} s")

    async def _watch_health(self) -> None:
        loop = asyncio.get_running_loop()
        answered = loop.time()
        while not self._gone(loop.time() - answered):
            await asyncio.sleep(TICK_S)
            if await self._api.healthy(HEALTH_S):
                answered = loop.time()
        self._bury(f"vLLM's API has not answered for {loop.time() - answered:.0f} s")

    def _gone(self, silent_s: float) -> bool:
        """Whether a server that has said nothing for so long will not say anything any more."""
        return silent_s > HUNG_S or (silent_s >= HEALTH_S and is_stopped(self.pid))

    def _bury(self, cause: str, gently: bool = False) -> None:
        """Make sure that all of it is dead, then tell everyone who waits for it."""
        if self._burying is None:
            self._burying = asyncio.create_task(self._end(cause, gently))

    async def _end(self, cause: str, gently: bool) -> None:
        status = None if gently else await self._process.status(STATUS_S)
        said = await self._process.end(gently)
        await self._connected.close()
        await self._api.close()
        text = cause
        if cause != "closed":
            ended = "" if status is None else f" (vLLM ended with status {status})"
            text = f"{cause}{ended}: {said}" if said else f"{cause}{ended}"
        self._lost.set_result(text)
        if cause != "closed":
            log.warning("engine lost pid=%d cause=%s", self.pid, text)
        for work in self._work.values():
            work.cancel()
        for job in self._jobs.values():
            job.stream.lose(text)
        self._jobs.clear()
        self._work.clear()
