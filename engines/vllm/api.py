"""A vLLM server as its node talks to it: HTTP over a unix socket, prompts and answers as token ids."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp

GENERATE = "/inference/v1/generate"
_BASE = "http://vllm"
_CONNECT_S = 5.0
_LOOK_S = 0.5
_MAX_EVENT_BYTES = 64 << 20
_MAX_ERROR_BYTES = 1 << 16


class RequestRefused(Exception):
    """A request that was not taken, or given up; ``cause`` is a stable word.

    ``sampling``: vLLM calls it wrong; ``job``: the node's part of it cannot be; ``engine_error``: it went wrong.
    """

    def __init__(self, cause: str, text: str) -> None:
        super().__init__(text)
        self.cause = cause


class VllmApi:
    """One server's API. Requests end when whoever awaits them is cancelled: the connection closes, and vLLM aborts."""

    def __init__(self, socket: Path) -> None:
        connector = aiohttp.UnixConnector(str(socket), limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_S)
        self._http = aiohttp.ClientSession(_BASE, connector=connector, timeout=timeout)

    async def healthy(self, within_s: float) -> bool:
        """Whether the server answers, and says that it can serve."""
        try:
            async with self._http.get("/health", timeout=aiohttp.ClientTimeout(total=within_s)) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, OSError, TimeoutError):
            return False

    async def answering(self) -> None:
        """Return once it does."""
        while not await self.healthy(_LOOK_S):  # noqa: ASYNC110 (another process's state)
            await asyncio.sleep(_LOOK_S)

    async def context_tokens(self) -> int:
        """How many tokens a prompt and its answer may have together."""
        async with self._http.get("/v1/models") as answer:
            return int((await answer.json())["data"][0]["max_model_len"])

    async def metrics(self, within_s: float) -> str:
        """Its ``/metrics``. Raises aiohttp.ClientError, OSError or TimeoutError."""
        async with self._http.get("/metrics", timeout=aiohttp.ClientTimeout(total=within_s)) as answer:
            answer.raise_for_status()
            return await answer.text()

    async def run(self, body: dict[str, Any]) -> None:
        """One request of which only its end is of interest. Raises RequestRefused, aiohttp.ClientError, OSError."""
        async with self._http.post(GENERATE, json=body | {"stream": False}) as answer:
            if answer.status != 200:
                raise await _refusal(answer)
            await answer.read()

    async def stream(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """One request's answer, choice by choice. Raises RequestRefused, aiohttp.ClientError, OSError."""
        async with self._http.post(GENERATE, json=body | {"stream": True}) as answer:
            if answer.status != 200:
                raise await _refusal(answer)
            rest = b""
            async for data in answer.content.iter_any():
                *events, rest = (rest + data).split(b"\n\n")
                if len(rest) > _MAX_EVENT_BYTES:
                    raise RequestRefused("engine_error", f"an event of more than {_MAX_EVENT_BYTES} bytes")
                for event in events:
                    said = event.removeprefix(b"data: ")
                    if said == b"[DONE]":
                        return
                    message = json.loads(said)
                    if "error" in message:
                        raise RequestRefused("engine_error", str(message["error"])[:500])
                    for choice in message["choices"]:
                        yield choice
            raise RequestRefused("engine_error", "the answer broke off")

    async def close(self) -> None:
        """Close all connections."""
        await self._http.close()


async def _refusal(answer: aiohttp.ClientResponse) -> RequestRefused:
    text = (await answer.content.read(_MAX_ERROR_BYTES)).decode(errors="replace")
    with contextlib.suppress(ValueError, KeyError, TypeError):
        text = json.loads(text)["error"]["message"]
    return RequestRefused("sampling" if answer.status == 400 else "engine_error", text[:500])
