"""A gateway in this process on a real socket, a model directory without weights to speak of, and fake nodes."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from gateway.app import Gateway
from gateway.config import GatewayConfig
from gateway.front import Front
from gateway.joining.stream_protocol import StreamProtocol
from gateway.model import ServedModel, load_model
from gateway.state import State
from kvcache.control import ModelInfo
from kvcache.layout import DType
from kvcache.wire import Role
from tests.gateway.fakes import FakeNode
from tests.gateway.model_files import write_model
from tests.models import CONTEXT, VOCAB


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    write_model(path)
    return path


@pytest.fixture(scope="session")
def model(model_dir: Path) -> ServedModel:
    return load_model(model_dir, "tiny", DType.FLOAT32)


@pytest.fixture
def config(model_dir: Path) -> GatewayConfig:
    return GatewayConfig(
        model_dir, "tiny", DType.FLOAT32, port=0, threshold_tokens=32, request_timeout_s=20.0, canary_s=0
    )


@pytest.fixture
def info(model: ServedModel) -> ModelInfo:
    return ModelInfo("tiny", model.fingerprint.parts(), CONTEXT, 256, VOCAB)


class Stage:
    """A running gateway, its nodes and a client."""

    def __init__(self, gateway: Gateway, server: uvicorn.Server, url: str, info: ModelInfo) -> None:
        self.gateway = gateway
        self.server = server
        self.url = url
        self.info = info
        self.nodes: list[FakeNode] = []
        self.client = httpx.AsyncClient(base_url=url, timeout=30.0)

    async def node(self, name: str, role: Role, **options: Any) -> FakeNode:
        node = FakeNode(self.url, name, role, options.pop("model", self.info), **options)
        await node.start()
        self.nodes.append(node)
        if node.refused is None:
            await self.until(lambda: (s := self.gateway.registry.node(name)) is not None and s.accepting)
        return node

    async def pair(self, cluster: str = "local", **options: Any) -> tuple[FakeNode, FakeNode]:
        """A prefill node in ``cluster`` and a local decode node; options for either by prefix-free name."""
        on_prefill, on_generate = options.pop("on_prefill", None), options.pop("on_generate", None)
        if cluster != "local":
            self.register(cluster)
        prefill = await self.node(f"p-{cluster}", Role.PREFILL, cluster=cluster, on_prefill=on_prefill, **options)
        decode = await self.node("d", Role.DECODE, on_generate=on_generate)
        return prefill, decode

    def register(self, cluster: str) -> None:
        from gateway.clusters import Dial

        self.gateway.registry.register(cluster, Dial.IN)

    async def complete(self, words: int = 3, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
        plain = {"model": "tiny", "prompt": "ab " * words, "max_tokens": 8} | body
        return await self.client.post("/v1/completions", json=plain, headers=headers)

    async def decision(self, request_id: str) -> dict[str, Any]:
        found: dict[str, Any] = (await self.client.get(f"/v1/decisions/{request_id}")).json()
        return found

    async def until(self, condition: Callable[[], Any], timeout_s: float = 5.0) -> None:
        async with asyncio.timeout(timeout_s):
            while not condition():  # noqa: ASYNC110 (it polls state that has no event)
                await asyncio.sleep(0.005)

    async def close(self) -> None:
        await self.client.aclose()
        for node in self.nodes:
            await node.stop()


Open = Callable[..., Awaitable[Stage]]


@pytest.fixture
async def stage(config: GatewayConfig, model: ServedModel, info: ModelInfo) -> AsyncIterator[Open]:
    """``await stage(fallback=...)`` opens a gateway; at the end all is checked and closed."""
    opened: list[tuple[Stage, uvicorn.Server, asyncio.Task[None], Gateway]] = []

    async def start(**changes: Any) -> Stage:
        changed = replace(config, **changes)
        gateway = Gateway(changed, model, State(changed.state_file))
        server = uvicorn.Server(
            uvicorn.Config(
                gateway,
                port=0,
                http=Front,
                ws=StreamProtocol,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=1,
            )
        )
        task = asyncio.create_task(server._serve())
        while not server.started:  # noqa: ASYNC110 (uvicorn offers no event)
            await asyncio.sleep(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        one = Stage(gateway, server, f"http://127.0.0.1:{port}", info)
        opened.append((one, server, task, gateway))
        return one

    yield start
    for one, server, task, gateway in opened:
        await one.close()
        server.should_exit = True
        await task
        gateway.close()
        assert [violation for node in one.nodes for violation in node.violations] == []
        for session in gateway.registry.nodes():
            assert not session.jobs
            assert not session.awaited
            assert not session.prefilling
        for cluster in gateway.registry.clusters:
            assert gateway.registry.link(cluster.name).queued_bytes == 0
            assert gateway.registry.outward(cluster.name).queued_bytes == 0
