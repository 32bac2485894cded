"""A vLLM server's outside with the miniature inside: ``python -m tests.engines.vllm.fake_server MODE ...``.

It stands where vLLM's Python would: it takes the node's command line, listens at ``--uds``, attaches as a worker, and
answers with tokens 101, 102 and so on. MODE: ``good``; ``refuses`` (its cache does not fit).
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from engines.vllm.attaching import Identity, attach
from engines.vllm.blocks import LayerBlocks
from engines.vllm.bookkeeping import PARAMS, JobParams
from engines.vllm.messages import PoolInfo
from tests.engines.vllm.fake_vllm import FakeRequest, FakeVllm

CONTEXT = 2048


class FakeServer:
    """One engine loop in a thread, and an API."""

    def __init__(self, socket: str, refuses: bool) -> None:
        self._refuses = refuses
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)
        self._number = 0
        self._vllm: FakeVllm | None = None
        working = attach(socket, Identity(0, 1, "vec", (16,)), self._layers)
        assert self._vllm is not None
        self._vllm.workers = [working]
        threading.Thread(target=self._run, daemon=True).start()

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if body["sampling_params"].get("top_p", 1.0) > 1:
            return web.json_response({"error": {"message": "top_p must be at most 1"}}, status=400)
        with self._lock:
            assert self._vllm is not None
            self._number += 1
            params = (body.get("kv_transfer_params") or {}).get(PARAMS)
            said = body["sampling_params"]["max_tokens"]
            job = JobParams(**params) if params else None
            mine = self._vllm.add(f"{body.get('request_id')}-{self._number}", body["token_ids"], job, said)
            self._news.notify()
        try:
            if not body["stream"]:
                while mine not in self._vllm.finished:  # noqa: ASYNC110 (a thread's state)
                    await asyncio.sleep(0.001)
                return web.json_response({}) if not mine.failed else web.json_response({}, status=500)
            answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
            await answer.prepare(request)
            await self._stream(answer, body, mine)
            return answer
        finally:
            with self._lock:
                if mine.request_id in self._vllm.requests:
                    self._vllm.abort(mine.request_id)

    async def _stream(self, answer: web.StreamResponse, body: dict[str, Any], mine: FakeRequest) -> None:
        assert self._vllm is not None
        told = 0
        wanted = body["sampling_params"].get("logprobs")
        while True:
            over = mine in self._vllm.finished
            while told < mine.said:
                told += 1
                token, last = 100 + told, told == body["sampling_params"]["max_tokens"]
                stops = token in body["sampling_params"].get("stop_token_ids", ())
                reason = "stop" if stops else "length" if last else None
                entry = {"token_id": token, "logprob": -1.0, "top_logprobs": [{"token_id": token, "logprob": -1.0}]}
                choice = {"index": 0, "token_ids": [token], "finish_reason": reason}
                choice["logprobs"] = None if wanted is None else {"content": [entry]}
                await self._send(answer, {"choices": [choice]})
                if stops:
                    break
            else:
                if not over:
                    await asyncio.sleep(0.001)
                    continue
            if mine.failed:
                await self._send(answer, {"error": {"message": "KV load failure"}})
            await answer.write(b"data: [DONE]\n\n")
            return

    async def _send(self, answer: web.StreamResponse, message: dict[str, Any]) -> None:
        await answer.write(b"data: " + json.dumps(message).encode() + b"\n\n")

    def _layers(self, info: PoolInfo) -> Mapping[str, LayerBlocks]:
        if self._refuses:
            raise ValueError("the attention kernel packs its KV cache as 'amx'")
        self._vllm = FakeVllm(info.layout, info.block_tokens, budget=info.chunk_tokens, blocks=2000)
        return self._vllm.layers[0]

    def _run(self) -> None:
        assert self._vllm is not None
        while True:
            with self._lock:
                if not self._vllm.requests:
                    self._news.wait(0.05)
                self._vllm.step()
            time.sleep(0.001)  # whoever waits for the lock gets it


async def health(request: web.Request) -> web.Response:
    return web.Response()


async def models(request: web.Request) -> web.Response:
    return web.json_response({"data": [{"max_model_len": CONTEXT}]})


async def main() -> None:
    mode, arguments = sys.argv[1], sys.argv[2:]
    config = json.loads(arguments[arguments.index("--kv-transfer-config") + 1])
    server = FakeServer(config["kv_connector_extra_config"]["prfaas_socket"], mode == "refuses")
    app = web.Application(client_max_size=64 << 20)
    app.router.add_get("/health", health)
    app.router.add_get("/v1/models", models)
    app.router.add_post("/inference/v1/generate", server.generate)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    await web.UnixSite(runner, arguments[arguments.index("--uds") + 1]).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main())
