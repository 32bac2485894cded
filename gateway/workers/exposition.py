"""Metrics of all workers in one answer: whoever is asked asks the others, and every series says whose it is.

With a label for the worker nothing is added up here, so that a worker that begins anew is seen as what it is: a reset
of its own counters and of nobody else's.
"""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import Callable
from contextlib import suppress

from gateway.workers.worker import Worker

log = logging.getLogger(__name__)

PATIENCE_S = 1.0
MAX_BYTES = 64 << 20
_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(\{(.*)\})?( .*)$")


class SharedExposition:
    """``start`` it on the event loop; ``render`` tells this worker's own metrics."""

    def __init__(self, worker: Worker, render: Callable[[], bytes]) -> None:
        self._worker = worker
        self._render = render
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Answer the others."""
        path = self._worker.socket_of(self._worker.number)
        path.unlink(missing_ok=True)  # of the one that was here before
        self._server = await asyncio.start_unix_server(self._tell, path)

    async def stop(self) -> None:
        """Answer nobody any more. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()
            self._worker.socket_of(self._worker.number).unlink(missing_ok=True)

    async def render(self) -> bytes:
        """Everybody's. One that does not answer within a second is left out, and ``prfaas_workers`` says so."""
        others = [number for number in range(self._worker.count) if number != self._worker.number]
        told = await asyncio.gather(*(self._ask(number) for number in others))
        texts = {self._worker.number: self._render().decode()}
        texts |= {number: text for number, text in zip(others, told, strict=True) if text is not None}
        return merged(texts).encode()

    async def _tell(self, _: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            writer.write(self._render())
            await writer.drain()
        writer.close()

    async def _ask(self, number: int) -> str | None:
        try:
            async with asyncio.timeout(PATIENCE_S):
                reader, writer = await asyncio.open_unix_connection(self._worker.socket_of(number), limit=MAX_BYTES)
                try:
                    return (await reader.read(-1)).decode()
                finally:
                    writer.close()
        except (OSError, TimeoutError) as error:
            log.warning("worker does not tell its metrics number=%d cause=%s", number, type(error).__name__)
            return None


def merged(texts: dict[int, str]) -> str:
    """Text expositions by worker as one, each sample with a label ``worker``, each family's samples together."""
    families: dict[str, tuple[list[str], list[str]]] = {}
    for number, text in sorted(texts.items()):
        samples: list[str] = []
        for line in text.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                about, samples = families.setdefault(name, ([], []))
                if not about:
                    about.append(line)
            elif line.startswith("# TYPE "):
                about, samples = families.setdefault(line.split(" ", 3)[2], ([], []))
                if len(about) < 2:
                    about.append(line)
            elif found := _SAMPLE.match(line):
                labels = f'{found[3]},worker="{number}"' if found[3] else f'worker="{number}"'
                samples.append(f"{found[1]}{{{labels}}}{found[4]}")
    lines = [line for about, samples in families.values() for line in (*about, *samples)]
    count = ("# HELP prfaas_workers Worker processes that tell their metrics", "# TYPE prfaas_workers gauge")
    return "\n".join([*lines, *count, f"prfaas_workers {len(texts)}", ""])
