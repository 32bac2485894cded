"""Engines that come, go, fall ill and recover, as the gateway and its operators see them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.config import GatewayConfig
from gateway.fleet import health as health_module
from gateway.fleet.config import DialectName, EngineConfig, EngineRole
from gateway.fleet.engine import Engine
from gateway.fleet.fleet import Changes, Fleet
from gateway.fleet.health import HealthWatch
from gateway.live import LiveConfig
from gateway.reloading import Reloading
from gateway.upstream.pool import Pool
from tests.gateway.conftest import Open
from tests.gateway.fleet.http_engine import HttpEngine
from tests.gateway.fleet.strict_engines import MooncakePrefill, Wire

ONE = EngineConfig("http://127.0.0.1:1", "a", "tiny")


def test_an_engine_that_is_as_it_was_keeps_what_is_known_of_it() -> None:
    fleet = Fleet((ONE, replace(ONE, name="b")), "local")
    a, b = fleet.engines
    a.speed.observe(0, 1000, 1.0)
    use = b.begin(0.0)
    assert fleet.apply((ONE, replace(ONE, name="c"))) == Changes(("c",), ("b",))
    assert fleet.engine("a") is a
    assert fleet.engine("b") is None
    assert [engine.name for engine in fleet.engines] == ["a", "c", "b"]
    assert (b.draining, b.accepting(0.0)) == (True, False)
    use.end(True, 1.0)
    assert [engine.name for engine in fleet.engines] == ["a", "c"]


def test_prefill_engines_speak_no_answers() -> None:
    split = replace(ONE, dialect=DialectName.SGLANG)
    fleet = Fleet((replace(split, name="p", role=EngineRole.PREFILL), replace(split, name="d")), "local")
    assert [engine.name for engine in fleet.speakers] == ["d"]
    assert fleet.splits
    fleet.apply((ONE,))
    assert not fleet.splits


def test_an_engine_at_another_address_is_another_engine() -> None:
    fleet = Fleet((ONE,), "local")
    fleet.apply((replace(ONE, url="http://127.0.0.1:2"),))
    assert fleet.engine("a") is not None
    assert fleet.engine("a").trouble == "not checked yet"  # type: ignore[union-attr]
    assert fleet.models == ["tiny"]


def test_only_a_prefill_that_had_its_engine_for_itself_teaches_how_fast_it_is() -> None:
    engine = Engine(ONE)
    first = engine.begin(0.0, 1000)
    second = engine.begin(0.0, 1000)
    for use in (first, second):
        use.computed(2.0)
        use.learn(0, 1000)
    assert engine.speed.curve is None
    third = engine.begin(0.0, 1000)
    assert engine.prefilling_tokens == 1000
    third.computed(1.0)
    assert engine.prefilling_tokens == 0
    third.learn(0, 1000)
    assert engine.speed.tokens_per_s == pytest.approx(1000.0)
    for use in (first, second, third, third):
        use.end(True, 1.0)
    assert (engine.running, engine.prefilling_tokens) == (0, 0)


def test_the_emptiest_rank_is_taken_unless_another_one_is_better() -> None:
    engine = Engine(replace(ONE, ranks=3))
    uses = [engine.begin(0.0) for _ in range(3)]
    assert [use.rank for use in uses] == [0, 1, 2]
    uses[1].end(True, 0.0)
    assert engine.begin(0.0).rank == 1
    assert engine.begin(0.0, rank=2).rank == 2
    assert Engine(ONE).begin(0.0).rank is None


@pytest.fixture
async def server() -> AsyncIterator[HttpEngine]:
    engine = HttpEngine()
    await engine.start()
    yield engine
    await engine.stop()


async def test_who_starts_waits_until_engines_were_looked_at_but_not_for_one_that_says_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    silent, asked = asyncio.Event(), asyncio.Event()

    async def ask(self: HealthWatch, engine: Engine) -> None:
        asked.set()
        await silent.wait()

    monkeypatch.setattr(HealthWatch, "_ask", ask)
    fleet = Fleet((ONE,), "local")
    watch = HealthWatch(fleet, Pool())
    watch.start()
    first = asyncio.create_task(watch.first())
    await asked.wait()
    assert not first.done()
    silent.set()
    await first
    assert fleet.engine("a").trouble is None  # type: ignore[union-attr]
    await watch.stop()

    monkeypatch.setattr(health_module, "FIRST_S", 0.01)
    silent.clear()
    watch = HealthWatch(fleet, Pool())
    watch.start()
    await asyncio.wait_for(watch.first(), 1.0)
    await watch.stop()


async def checked(engine: HttpEngine, monkeypatch: pytest.MonkeyPatch, **changes: object) -> tuple[Fleet, HealthWatch]:
    monkeypatch.setattr(health_module, "PATIENCE_S", 0.2)
    fleet = Fleet((replace(ONE, url=engine.url, **changes),), "local")  # type: ignore[arg-type]
    watch = HealthWatch(fleet, Pool())
    await watch.check()
    return fleet, watch


async def test_an_engine_is_given_work_once_it_was_found_well(
    server: HttpEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet, watch = await checked(server, monkeypatch)
    (engine,) = fleet.engines
    assert engine.accepting(0.0)
    server.healthy = False
    await watch.check()
    assert (engine.trouble, engine.accepting(0.0)) == ("/health answers 503", False)
    server.healthy = True
    await watch.check()
    assert engine.accepting(0.0)
    await server.stop()
    await watch.check()
    assert "connect_failed" in str(engine.trouble)


async def test_an_engine_with_another_model_is_named(server: HttpEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, _ = await checked(server, monkeypatch, model="huge")
    assert fleet.engines[0].trouble == "it serves tiny, not 'huge': correct model in the file of engines"


async def test_one_slow_look_is_no_illness_and_two_are(server: HttpEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, watch = await checked(server, monkeypatch)

    async def slow(method: str, path: str, body: dict[str, object]) -> tuple[int, object]:
        await asyncio.sleep(0.5)
        return 200, {}

    monkeypatch.setattr(server, "other", slow)
    await watch.check()
    assert fleet.engines[0].accepting(0.0)
    await watch.check()
    assert fleet.engines[0].trouble == "no answer within 0.2 s"


async def test_a_mooncake_engine_is_known_by_what_its_bootstrap_server_says_now(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = MooncakePrefill(Wire(), ranks=2)
    await server.start()
    where = server.url.removeprefix("http://")
    changes = {"dialect": DialectName.VLLM_MOONCAKE, "bootstrap": where, "ranks": 2}
    fleet, watch = await checked(server, monkeypatch, **changes)
    (engine,) = fleet.engines
    assert engine.engine_ids == {0: f"{server.url}-rank0", 1: f"{server.url}-rank1"}
    monkeypatch.setattr(server, "engine_id", lambda rank: f"restarted-{rank}")
    await watch.check()
    assert engine.engine_ids == {0: "restarted-0", 1: "restarted-1"}
    server.config["ranks"] = 1
    await watch.check()
    assert "knows no rank 1" in str(engine.trouble)
    await server.stop()


async def test_operators_see_engines_and_have_the_file_read_again(
    stage: Open, server: HttpEngine, tmp_path: Path
) -> None:
    file = tmp_path / "engines.toml"
    file.write_text(f'[[engine]]\nurl = "{server.url}"\nmodel = "other"\nname = "a"')
    one = await stage(engines_file=file)
    gateway = one.gateway
    (seen,) = (await one.client.get("/v1/engines")).json()["engines"]
    assert {name: seen[name] for name in ("name", "model", "dialect", "role", "accepting", "running")} == {
        "name": "a",
        "model": "other",
        "dialect": "openai",
        "role": "both",
        "accepting": False,
        "running": 0,
    }
    config: GatewayConfig = gateway.config
    live: LiveConfig = gateway.live
    gateway.reloading = Reloading(live, lambda: config, None)
    file.write_text(f'[[engine]]\nurl = "{server.url}"\nmodel = "tiny"\nname = "b"')
    changed = (await one.client.post("/v1/reload")).json()["changed"]
    assert changed == [{"option": "--engines", "was": "a", "now": "b"}]
    await one.until(lambda: gateway.fleet.engines[0].trouble is None)
    file.write_text(f'[[engine]]\nurl = "{server.url}"\nmodel = "tiny/else"\nname = "b"')
    await one.client.post("/v1/reload")
    listed = (await one.client.get("/v1/models")).json()["data"]
    assert [(model["id"], model["owned_by"]) for model in listed] == [("tiny", "prfaas"), ("tiny/else", "engines")]
    assert (await one.client.get("/v1/models/tiny/else")).json()["id"] == "tiny/else"
    file.write_text("[[engine]]")
    refused = await one.client.post("/v1/reload")
    assert (refused.status_code, "engine[0].url: missing" in refused.text) == (409, True)
    assert [engine.name for engine in gateway.fleet.engines] == ["b"]
