"""Asks what-if questions of a worker process: one at a time, each with a deadline, ended when nobody waits any more."""

from __future__ import annotations

import asyncio
import contextlib
import re
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import msgspec

from gateway.errors import ApiError
from gateway.what_if_worker import Task

DEADLINE_S = 120.0
MOST_LINE_BYTES = 1 << 20
_FIELD = re.compile(r"[a-z_]+(\.[\w.*-]+)?")


class WhatIf:
    """Runs workers. All methods run on the event loop."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        self._deadline_s = deadline_s
        self._busy = False

    async def lines(self, task: Task) -> AsyncGenerator[dict[str, Any]]:
        """``{"progress": share}`` as it goes on, at last ``{"answer": ...}``. Raises ApiError.

        Closing the iterator ends the worker.
        """
        if self._busy:
            raise ApiError(
                429, "another what-if question is being answered; ask again later", code="busy", retry_after_s=5
            )
        self._busy = True
        worker = None
        try:
            worker = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "gateway.what_if_worker"),
                stdin=PIPE,
                stdout=PIPE,
                stderr=DEVNULL,
                limit=MOST_LINE_BYTES,
                cwd=Path(__file__).parent.parent,
            )
            assert worker.stdin is not None
            assert worker.stdout is not None
            # no timeout spans a yield: the lines may be read by another task than the one that asked
            deadline = asyncio.get_running_loop().time() + self._deadline_s
            worker.stdin.write(msgspec.msgpack.encode(task))
            async with asyncio.timeout_at(deadline):
                await worker.stdin.drain()
            worker.stdin.close()
            while line := await _line(worker.stdout, deadline):
                said: dict[str, Any] = msgspec.json.decode(line)
                if "error" in said:
                    raise refused(said["error"])
                yield said
                if "answer" in said:
                    return
            raise ApiError(500, "the simulation ended without an answer", code="what_if_failed")
        except TimeoutError:
            raise ApiError(
                504,
                f"no answer within {self._deadline_s:g} s: ask with fewer requests, or a rate that the fleet can carry",
                param="requests",
                code="what_if_timeout",
            ) from None
        except (BrokenPipeError, ConnectionResetError) as error:
            raise ApiError(500, "the simulation ended without an answer", code="what_if_failed") from error
        finally:
            self._busy = False
            if worker is not None:
                with contextlib.suppress(ProcessLookupError):
                    worker.kill()
                await worker.wait()


async def _line(out: asyncio.StreamReader, deadline: float) -> bytes:
    async with asyncio.timeout_at(deadline):
        return await out.readline()


def refused(sentence: str) -> ApiError:
    """400 for a question that cannot be answered; its sentence begins with the field at fault."""
    field = sentence.split(":", 1)[0]
    return ApiError(400, sentence, param=field if _FIELD.fullmatch(field) else None, code="what_if_impossible")
