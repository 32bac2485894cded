"""The node's side of an engine process: start it, run jobs on it, notice at once when it is dead, stopped or mute."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import engines
from engines.channel import ChannelError, frame, read_event
from engines.protocol import (
    CancelCommand,
    Command,
    EngineEvent,
    EngineInfo,
    EngineLost,
    FinishCommand,
    GenerateCommand,
    JobFailed,
    Loading,
    PrefillCommand,
    Pulse,
    StoreCommand,
)
from engines.spec import REFUSAL, EngineSpec
from engines.stream import TERMINAL, ProcessStream
from kvcache.hostpool import HostPool

logger = logging.getLogger(__name__)

TICK_S = 0.5
SILENT_TICKS = 8
STDERR_LINES = 12
STDERR_LINE_CHARS = 400


class EngineProcess:
    """An embedded engine in a child process (implements ``engines.protocol.Engine``)."""

    def __init__(self, spec: EngineSpec, child: asyncio.subprocess.Process, writer: asyncio.StreamWriter) -> None:
        """Use ``start``."""
        self._spec = spec
        self._child = child
        self._writer = writer
        self._streams: dict[str, ProcessStream] = {}
        self._stderr: deque[str] = deque(maxlen=STDERR_LINES)
        self._heard = True
        self._lost: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._info: asyncio.Future[EngineInfo] = asyncio.get_running_loop().create_future()
        self._stderr_task = asyncio.create_task(self._read_stderr())
        self._tasks = [self._stderr_task]

    @classmethod
    async def start(
        cls,
        spec: EngineSpec,
        pool: HostPool,
        on_loading: Callable[[Loading], None] | None = None,
        timeout_s: float = 120.0,
    ) -> EngineProcess:
        """Start the process, load the model, run its self-check.

        Raises EngineLost, with the last lines that the process wrote, when it refuses the model, fails its self-check
        or takes longer than ``timeout_s``. ``pool`` stays the caller's and must outlive the engine.
        """
        ours, theirs = socket.socketpair()
        try:
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "engines.embedded"),
                *(str(theirs.fileno()), str(pool.fd), str(pool.page_bytes), str(pool.pages), str(os.getpid())),
                spec.to_json(),
                pass_fds=(theirs.fileno(), pool.fd),
                env=_environment(spec.threads),
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
        except BaseException:
            ours.close()
            raise
        finally:
            theirs.close()
        reader, writer = await asyncio.open_unix_connection(sock=ours)
        engine = cls(spec, child, writer)
        engine._run(engine._read(reader, on_loading))
        engine._run(engine._watch())
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.wait((engine._info, engine._lost), return_when=asyncio.FIRST_COMPLETED)
            if not engine._info.done():
                raise EngineLost(engine._lost.result())
        except TimeoutError:
            await engine.close()
            raise EngineLost(f"engine not ready after {timeout_s:.0f} s{engine._last_words()}") from None
        except BaseException:
            await engine.close()
            raise
        return engine

    @property
    def info(self) -> EngineInfo:
        """What was loaded."""
        return self._info.result()

    @property
    def pid(self) -> int:
        """The process id of the engine."""
        return self._child.pid

    def submit(self, command: PrefillCommand | GenerateCommand) -> ProcessStream:
        """Start a job at once. Raises ValueError where a job of that name still runs."""
        job = command.job
        if job in self._streams:
            raise ValueError(f"job {job!r} is still running")
        stream = ProcessStream(job, self._send_cancel)
        if self._lost.done():
            stream.lose(self._lost.result())
        elif len(self._streams) >= self._spec.max_jobs:
            stream.deliver(JobFailed(job, "queue_full", f"the engine holds {self._spec.max_jobs} jobs"), 0)
        else:
            try:
                self._send(command)
            except ValueError as error:
                stream.deliver(JobFailed(job, "too_large", str(error)), 0)
            else:
                self._streams[job] = stream
        return stream

    def store(self, command: StoreCommand) -> None:
        """Answer an offer of a job. Nothing happens where the job is over."""
        if command.job in self._streams and not self._lost.done():
            self._send(command)

    def finish(self, job: str) -> None:
        """End a generation as an end token would. Nothing happens where it is over."""
        if job in self._streams and not self._lost.done():
            self._send(FinishCommand(job))

    async def cancel(self, job: str) -> None:
        """Ask the job to end within one chunk; its stream then ends with JobCancelled. Unknown jobs are ignored."""
        self._send_cancel(job)

    async def wait_lost(self) -> str:
        """Return, with the cause, when the engine process is dead."""
        return await asyncio.shield(self._lost)

    async def close(self) -> None:
        """End the process and wait for it; streams that still run raise EngineLost. Idempotent."""
        self._writer.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await self._child.wait()
        await self._bury("closed")
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        self._tasks.append(asyncio.create_task(work))

    def _send(self, command: Command) -> None:
        self._writer.write(frame(command))

    def _send_cancel(self, job: str) -> None:
        if job in self._streams and not self._lost.done():
            self._send(CancelCommand(job))

    async def _read(self, reader: asyncio.StreamReader, on_loading: Callable[[Loading], None] | None) -> None:
        try:
            while (received := await read_event(reader)) is not None:
                self._heard = True
                self._dispatch(*received, on_loading)
            await self._bury("engine process ended")
        except ChannelError as error:
            await self._bury(f"engine broke the protocol: {error}")

    def _dispatch(self, event: EngineEvent, size: int, on_loading: Callable[[Loading], None] | None) -> None:
        if isinstance(event, EngineInfo):
            if not self._info.done():
                self._info.set_result(event)
        elif isinstance(event, Loading):
            if on_loading is not None:
                on_loading(event)
        elif not isinstance(event, Pulse):
            stream = self._streams.get(event.job)
            if stream is None:
                return
            if isinstance(event, TERMINAL):
                del self._streams[event.job]
            stream.deliver(event, size)

    async def _read_stderr(self) -> None:
        """Keep the last lines: they name the cause of a crash. The engine writes no prompt there."""
        assert self._child.stderr is not None
        rest = b""
        while data := await self._child.stderr.read(4096):
            *lines, rest = (rest + data).split(b"\n")
            for line in lines:
                text = line.decode(errors="replace").strip()[:STDERR_LINE_CHARS]
                if text:
                    self._stderr.append(text)
                    logger.debug("engine pid=%d %s", self._child.pid, text)
            rest = rest[:STDERR_LINE_CHARS]

    async def _watch(self) -> None:
        """Kill an engine that is loaded and silent. Ticks are counted, not seconds: our own stalls prove nothing."""
        silent = 0
        while silent < SILENT_TICKS:
            await asyncio.sleep(TICK_S)
            silent = 0 if self._heard or not self._info.done() else silent + 1
            self._heard = False
        await self._bury(f"engine silent for {SILENT_TICKS * TICK_S:.0f} s")

    async def _bury(self, cause: str) -> None:
        """Make sure that the process is dead, then tell everyone who waits for it."""
        if self._child.returncode is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.5 if cause == "engine process ended" else 0.0):
                    await self._child.wait()
        if self._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._child.kill()
        await self._child.wait()
        await asyncio.wait((self._stderr_task,), timeout=0.5)
        if self._lost.done():
            return
        text = f"{cause} ({_ending(self._child.returncode)}){self._last_words()}"
        self._lost.set_result(text)
        if cause != "closed":
            logger.warning("engine lost pid=%d cause=%s", self._child.pid, text)
        for stream in self._streams.values():
            stream.lose(text)
        self._streams.clear()
        self._writer.close()

    def _last_words(self) -> str:
        """Why it refused its model, if it said so; else all that is left of what it wrote."""
        said = [line for line in self._stderr if line.startswith(REFUSAL)] or self._stderr
        return ": " + " | ".join(said) if said else ""


def _ending(status: int | None) -> str:
    """How a process ended: its exit status, or the signal's name."""
    if status is not None and status < 0:
        with contextlib.suppress(ValueError):
            return signal.Signals(-status).name
    return f"exit status {status}"


def _environment(threads: int) -> dict[str, str]:
    root = str(Path(engines.__path__[0]).parent)
    path = os.environ.get("PYTHONPATH")
    return os.environ | {
        "PYTHONPATH": f"{root}{os.pathsep}{path}" if path else root,
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
        "PYTHONUNBUFFERED": "1",
    }
