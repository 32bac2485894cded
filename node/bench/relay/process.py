"""Processes of a benchmark: started, waited for until they listen, and ended in any case."""

from __future__ import annotations

import asyncio
import os
import secrets
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from node.bench.relay.engine import MODEL
from node.bench.relay.load import Target

START_S = 60.0
STOP_S = 10.0
_PRFAAS = (sys.executable, "-c", "from gateway.cli import main; main()")


class BenchError(RuntimeError):
    """Something did not start, with what it said."""


@asynccontextmanager
async def running(command: Sequence[str], directory: Path, said: str) -> AsyncIterator[tuple[int, str]]:
    """A process, once it has printed a line that contains ``said``: its pid and that line. Raises BenchError."""
    log = directory / f"{secrets.token_hex(4)}.log"
    with log.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *command, stdout=asyncio.subprocess.PIPE, stderr=errors, env={**os.environ, "PYTHONUNBUFFERED": "1"}
        )
    assert process.stdout is not None
    drained: asyncio.Task[bytes] | None = None
    try:
        try:
            async with asyncio.timeout(START_S):
                while said.encode() not in (line := await process.stdout.readline()):
                    if not line:
                        raise BenchError(f"{command[0]} ended: {log.read_text(errors='replace')[-2000:]}")
        except TimeoutError:
            raise BenchError(f"{command[0]} said nothing like {said!r} within {START_S:g} s") from None
        drained = asyncio.create_task(process.stdout.read())
        yield process.pid, line.decode().strip()
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            try:
                async with asyncio.timeout(STOP_S):
                    await process.wait()
            except TimeoutError:
                process.kill()
                await process.wait()
        if drained is not None:
            await drained


@asynccontextmanager
async def engine(directory: Path, rate: float) -> AsyncIterator[int]:
    """The engine that computes nothing; its port."""
    command = (sys.executable, "-m", "node.bench.relay.engine", "0", str(rate))
    async with running(command, directory, "listening") as (_, line):
        yield int(line.rpartition(" ")[2])


@asynccontextmanager
async def gateway(directory: Path, engine_port: int, options: Sequence[str] = ()) -> AsyncIterator[Target]:
    """``prfaas gateway`` in front of that engine, with keys, admission and metrics. Raises BenchError."""
    state, engines = directory / "state.db", directory / "engines.toml"
    table = {"url": f'"http://127.0.0.1:{engine_port}"', "model": f'"{MODEL}"', "max_running": "65536"}
    engines.write_text("[[engine]]\n" + "".join(f"{name} = {value}\n" for name, value in table.items()))
    key = await _key(state)
    files = ("--state", str(state), "--engines", str(engines))
    async with running((*_PRFAAS, "gateway", "--port", "0", *files, *options), directory, "listening") as (pid, line):
        target = Target(int(line.rpartition(":")[2]), pid, MODEL, key)
        await _until_ready(target)
        yield target


async def _key(state: Path) -> str:
    """A key that admits to everything; the first one of a state must."""
    command = (*_PRFAAS, "keys", "create", "--name", "bench", "--role", "admin", "--state", str(state))
    made = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    said, _ = await made.communicate()
    found = [word for word in said.decode().split() if word.startswith("prfaas-")]
    if made.returncode or not found:
        raise BenchError(f"no key: {said.decode()[-1000:]}")
    return found[-1]


async def _until_ready(target: Target) -> None:
    """Return when the gateway has found its engine well. Raises BenchError."""
    give_up = time.monotonic() + START_S
    while time.monotonic() < give_up:
        reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
        try:
            writer.write(b"GET /ready HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
            if b" 200 " in await reader.readline():
                return
        finally:
            writer.close()
        await asyncio.sleep(0.1)
    raise BenchError(f"the gateway was not ready within {START_S:g} s")
