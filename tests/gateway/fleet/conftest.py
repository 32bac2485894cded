"""A gateway in front of a strict pair of engines, in any dialect."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.conftest import Open, Stage
from tests.gateway.fleet import strict_engines as strict
from tests.gateway.fleet.http_engine import HttpEngine
from tests.gateway.fleet.strict_engines import Wire

DIALECTS: dict[str, tuple[Callable[..., HttpEngine], Callable[..., HttpEngine]]] = {
    "vllm-nixl-pull": (strict.NixlPrefill, strict.NixlDecode),
    "vllm-nixl-push": (strict.NixlPushPrefill, strict.NixlPushDecode),
    "vllm-mooncake": (strict.MooncakePrefill, strict.MooncakeDecode),
    "sglang": (strict.SglangPrefill, strict.SglangDecode),
}
LONG = list(range(1, 61))
"""More tokens than the threshold."""
TOLD_S = 2.0
"""Within which both engines know that nobody wants anything any more."""


class Pairs:
    """One gateway, prefill engines in cluster east, decode engines at home."""

    def __init__(self, dialect: str, wire: Wire, prefill: list[Any], decode: list[Any], stage: Stage) -> None:
        self.dialect = dialect
        self.wire = wire
        self.prefills = prefill
        self.decodes = decode
        self.stage = stage

    @property
    def p(self) -> Any:
        return self.prefills[0]

    @property
    def d(self) -> Any:
        return self.decodes[0]

    @property
    def stays_whole(self) -> bool:
        """Whether decode engines can serve a request alone."""
        return self.dialect != "sglang"

    async def ask(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        plain = {"model": "tiny", "max_tokens": 4} | body
        if "messages" not in plain:
            plain.setdefault("prompt", LONG)
        return await self.stage.client.post(path, json=plain)

    async def alone(self, path: str = "/v1/completions", **body: Any) -> httpx.Response:
        """What the decode engine says when it is asked directly, as if it had done all of it."""
        engine = HttpEngine()
        engine.cached = self.p.cached
        await engine.start()
        plain = {"model": "tiny", "max_tokens": 4} | body
        if "messages" not in plain:
            plain.setdefault("prompt", LONG)
        async with httpx.AsyncClient(base_url=engine.url) as client:
            answer = await client.post(path, json=plain)
        await engine.stop()
        return answer

    async def settled(self) -> None:
        """Nothing runs and nothing is kept anywhere. Fails where that takes too long."""
        engines = [*self.prefills, *self.decodes]
        fleet = self.stage.gateway.fleet
        busy = [lambda: any(engine.running for engine in engines), self.wire.holds]
        busy.append(lambda: any(one.running or one.prefilling_tokens for one in fleet.engines))
        await self.stage.until(lambda: not any(still() for still in busy), TOLD_S)


Pair = Callable[..., Awaitable[Pairs]]


@pytest.fixture
async def pairs(stage: Open, tmp_path: Path) -> AsyncIterator[Pair]:
    """``await pairs("sglang", decodes=2, request_timeout_s=1.0)``; at the end nothing may be left anywhere."""
    opened: list[Pairs] = []

    async def start(
        dialect: str, prefills: int = 1, decodes: int = 1, ranks: int = 1, fields: str = "", **changes: Any
    ) -> Pairs:
        wire = Wire()
        make_prefill, make_decode = DIALECTS[dialect]
        prefill = [make_prefill(wire, ranks=ranks) for _ in range(prefills)]
        decode = [make_decode(wire, ranks=ranks) for _ in range(decodes)]
        tables = []
        for at, engine in enumerate([*prefill, *decode]):
            await engine.start()
            is_prefill = at < prefills
            role, cluster = ("prefill", "east") if is_prefill else ("decode", "local")
            table = [f'url = "{engine.url}"', f'role = "{role}"', f'cluster = "{cluster}"', f'dialect = "{dialect}"']
            table += ['model = "tiny"', f'name = "{"p" if is_prefill else "d"}{at}"', f"ranks = {ranks}"]
            if is_prefill and dialect in ("vllm-mooncake", "sglang"):
                table.append(f'bootstrap = "{engine.url.removeprefix("http://")}"')
            tables.append("\n".join(["[[engine]]", *table, fields]))
        file = tmp_path / f"engines-{len(opened)}.toml"
        file.write_text("\n".join(tables))
        one = Pairs(dialect, wire, prefill, decode, await stage(engines_file=file, **changes))
        opened.append(one)
        await one.stage.until(lambda: all(engine.trouble is None for engine in one.stage.gateway.fleet.engines))
        return one

    yield start
    for one in opened:
        try:
            await one.settled()
            assert [violation for engine in (*one.prefills, *one.decodes) for violation in engine.violations] == []
            assert one.wire.expired_reads == 0
        finally:
            for engine in (*one.prefills, *one.decodes):
                await engine.stop()
