"""How a job becomes a request to vLLM, and what of its answer becomes the job's events.

A job is made known to the workers first: the request names it, and nothing of its pages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec

from engines.protocol import GenerateCommand, PrefillCommand, Spoken, Token
from engines.vllm.api import RequestRefused, VllmApi
from engines.vllm.bookkeeping import JobParams
from engines.vllm.jobs import VllmJob
from engines.vllm.messages import Enlist
from engines.vllm.sampling import sampling_params, token_logprobs

ENLIST_S = 10.0
END_S = 30.0
"""How long vLLM may take to say that a request is over, once its answer is: its step under way may be a long one."""
_TOKEN_BYTES = 32
"""About what one token, or one log-probability, takes on its way to its reader."""


class Requests:
    """Sends jobs to one server. ``send`` says something to all of its workers. Cancelling a job aborts its request."""

    def __init__(self, api: VllmApi, send: Callable[[msgspec.Struct], None]) -> None:
        self._api = api
        self._send = send

    async def run(self, job: VllmJob, command: PrefillCommand | GenerateCommand) -> None:
        """Run one job to its end. Raises RequestRefused, aiohttp.ClientError, OSError or TimeoutError."""
        if isinstance(command, PrefillCommand):
            await self._prefill(job, command)
        else:
            await self._generate(job, command)

    async def _prefill(self, job: VllmJob, command: PrefillCommand) -> None:
        """Compute and export: vLLM reads the prompt to ``stop`` and its one sampled token is nobody's."""
        enlist = Enlist(
            job.name,
            command.start,
            command.stop,
            command.pages,
            held=command.cached,
            load=command.cached,
            load_pages=command.cached_pages,
            checkpoints=command.checkpoints,
        )
        await self._enlist(job, enlist)
        params = JobParams(job.name, command.cached, watched=True)
        greedy = {"max_tokens": 1, "temperature": 0.0, "ignore_eos": True, "detokenize": False}
        body = self._body(command, command.token_ids[: command.stop], params, greedy)
        await self._api.run(body)
        async with asyncio.timeout(END_S):
            await job.computed.wait()
        await job.settled.wait()

    async def _generate(self, job: VllmJob, command: GenerateCommand) -> None:
        """Speak after what is loaded; the rest of the prompt is computed in place."""
        enlist = Enlist(
            job.name,
            load=command.loaded,
            load_pages=command.pages,
            checkpoints=command.checkpoints,
            keep_from=command.keep_from,
        )
        await self._enlist(job, enlist)
        watched = command.keep_from is not None or bool(command.checkpoints)
        params = JobParams(job.name, command.loaded, watched, command.keep_from)
        body = self._body(command, command.token_ids, params, sampling_params(command.sampling))
        speaking = asyncio.create_task(self._speak(job, command, body))
        finishing = asyncio.create_task(job.finishing.wait())
        try:
            await asyncio.wait((speaking, finishing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            finishing.cancel()
            if not speaking.done():
                speaking.cancel()
                await asyncio.wait((speaking,))
        job.reason = "stop" if speaking.cancelled() else speaking.result()
        if watched:
            job.deliver(Spoken(job.name, job.reason))
            async with asyncio.timeout(END_S):
                await job.ended.wait()
            await job.settled.wait()

    async def _speak(self, job: VllmJob, command: GenerateCommand, body: dict[str, Any]) -> str:
        """Say the tokens as they come; returns why the answer ended. An end token is not said."""
        wanted = command.sampling.logprobs
        async for choice in self._api.stream(body):
            ids, reason = choice["token_ids"], choice["finish_reason"]
            if reason == "stop":
                ids = ids[:-1]
            content = (choice.get("logprobs") or {}).get("content") or []
            for at, token in enumerate(ids):
                found = None if wanted is None else token_logprobs(content[at], wanted)
                job.deliver(Token(job.name, token, found), _TOKEN_BYTES * (1 + len(found or ())))
            if reason in ("stop", "length"):
                return str(reason)
            if reason is not None:
                raise RequestRefused("engine_error", f"vLLM ended the answer with {reason!r}")
        raise RequestRefused("engine_error", "the answer has no end")

    def _body(
        self,
        command: PrefillCommand | GenerateCommand,
        token_ids: tuple[int, ...],
        params: JobParams,
        sampling: dict[str, Any],
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "request_id": params.job,
            "token_ids": token_ids,
            "sampling_params": sampling,
            "priority": command.priority,
            "kv_transfer_params": params.as_params(),
        }
        return body | ({"cache_salt": command.salt} if command.salt else {})

    async def _enlist(self, job: VllmJob, enlist: Enlist) -> None:
        """Have every worker know the job. Raises RequestRefused where one will not have it."""
        try:
            self._send(enlist)
        except ValueError as error:
            raise RequestRefused("job", str(error)) from error
        async with asyncio.timeout(ENLIST_S):
            await job.enlisted.wait()
        if job.refusal:
            raise RequestRefused("job", job.refusal)
