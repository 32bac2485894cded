"""Engines in pods, found by label, from an API server that answers as the real one does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.config import ConfigError
from gateway.fleet.config import DialectName, EngineConfig, EngineRole, PodEngines, parse, parse_pods, read_pods
from gateway.fleet.pods import PodWatch

TABLE = {"selector": "app=vllm,tier=prefill", "port": 8001, "model": "gemma", "role": "prefill"}
TABLE |= {"dialect": "vllm-nixl-pull", "cluster": "east"}


def pod(name: str, address: str = "10.0.0.1", ready: str = "True", **more: Any) -> dict[str, Any]:
    metadata = {"name": name, "uid": "u", "labels": {"app": "vllm", "tier": "prefill"}} | more
    conditions = [{"type": "PodScheduled", "status": "True"}, {"type": "Ready", "status": ready, "reason": ""}]
    status = {"phase": "Running", "podIP": address, "podIPs": [{"ip": address}], "conditions": conditions}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {}, "status": status}


class ApiServer:
    """Lists pods by label, in pages; without the token it refuses."""

    def __init__(self) -> None:
        self.pods: list[dict[str, Any]] = []
        self.page = 500
        self.down = False
        self.asked = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.asked += 1
        if self.down:
            raise httpx.ConnectError("refused")
        if request.headers.get("authorization") != "Bearer t0ken":
            return httpx.Response(401, json={"kind": "Status", "status": "Failure", "reason": "Unauthorized"})
        if (request.method, request.url.path) != ("GET", "/api/v1/namespaces/serving/pods"):
            return httpx.Response(403, json={"kind": "Status", "status": "Failure", "reason": "Forbidden"})
        wanted = dict(part.split("=") for part in request.url.params["labelSelector"].split(","))
        found = [each for each in self.pods if wanted.items() <= each["metadata"]["labels"].items()]
        begin = int(request.url.params.get("continue") or 0)
        end = begin + min(self.page, int(request.url.params["limit"]))
        more = {"continue": str(end), "remainingItemCount": len(found) - end} if end < len(found) else {}
        listed = {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "7"} | more}
        return httpx.Response(200, json=listed | {"items": found[begin:end]})


@pytest.fixture
def account(tmp_path: Path) -> Path:
    (tmp_path / "token").write_text("t0ken\n")
    (tmp_path / "namespace").write_text("serving")
    return tmp_path


def watch(server: ApiServer, account: Path, told: list[tuple[EngineConfig, ...]]) -> PodWatch:
    http = httpx.AsyncClient(base_url="http://api", transport=httpx.MockTransport(server))
    selectors: tuple[PodEngines, ...] = parse_pods({"kubernetes": [TABLE]}, "local")
    return PodWatch(http, account, selectors, told.append, every_s=0.01)


async def test_ready_pods_are_engines_at_their_addresses(account: Path) -> None:
    server, told = ApiServer(), []
    server.pods = [pod("vllm-1", "10.0.0.2"), pod("vllm-0"), pod("vllm-2", "fd00::2")]
    one = watch(server, account, told)
    await one.look()
    assert [(e.name, e.url) for e in one.found] == [
        ("vllm-0", "http://10.0.0.1:8001"),
        ("vllm-1", "http://10.0.0.2:8001"),
        ("vllm-2", "http://[fd00::2]:8001"),
    ]
    assert one.found[0].role is EngineRole.PREFILL
    assert (one.found[0].dialect, one.found[0].cluster) == (DialectName.VLLM_NIXL_PULL, "east")
    await one.stop()


async def test_pods_that_are_not_ready_going_or_of_other_labels_are_none(account: Path) -> None:
    server, told = ApiServer(), []
    server.pods = [
        pod("starting", ready="False"),
        pod("going", deletionTimestamp="2026-01-01T00:00:00Z"),
        pod("pending") | {"status": {"phase": "Pending"}},
        pod("other", labels={"app": "web"}),
    ]
    one = watch(server, account, told)
    await one.look()
    assert one.found == ()
    assert told == []
    await one.stop()


async def test_changes_are_told_once_and_long_lists_come_in_pages(account: Path) -> None:
    server, told = ApiServer(), []
    server.page = 2
    server.pods = [pod(f"vllm-{n}", f"10.0.0.{n}") for n in range(5)]
    one = watch(server, account, told)
    for _ in range(3):
        await one.look()
    assert [len(engines) for engines in told] == [5]
    server.pods.pop()
    await one.look()
    assert [len(engines) for engines in told] == [5, 4]
    await one.stop()


async def test_while_the_api_server_is_away_the_engines_found_last_stay(account: Path) -> None:
    server, told = ApiServer(), []
    server.pods = [pod("vllm-0")]
    one = watch(server, account, told)
    one.start()
    async with asyncio.timeout(5):
        while not told:  # noqa: ASYNC110 (it polls state that has no event)
            await asyncio.sleep(0.005)
        server.down = True
        before = server.asked
        while server.asked < before + 3:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        assert len(one.found) == 1
        server.down, server.pods = False, []
        while one.found:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    await one.stop()


async def test_without_the_right_to_list_pods_nothing_changes(account: Path) -> None:
    (account / "token").write_text("another")
    one = watch(ApiServer(), account, [])
    with pytest.raises(httpx.HTTPStatusError, match="401"):
        await one.look()
    await one.stop()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"port": 0}, "kubernetes[0].port"),
        ({"selector": ""}, "kubernetes[0].selector"),
        ({"scheme": "ftp"}, "kubernetes[0].scheme"),
        ({"url": "http://x"}, "kubernetes[0].url"),
        ({"role": "king"}, "kubernetes[0].role"),
        ({"namespace": "a b"}, "kubernetes[0].namespace"),
        ({"colour": "red"}, "kubernetes[0].colour"),
    ],
)
def test_a_table_that_cannot_work_is_refused_by_its_field(change: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named.replace("[", r"\[").replace("]", r"\]")):
        parse_pods({"kubernetes": [TABLE | change]}, "local")


def test_a_file_may_hold_pods_alone_and_is_refused_outside_of_a_cluster(tmp_path: Path) -> None:
    assert parse({"kubernetes": [TABLE]}, "local") == ()
    file = tmp_path / "engines.toml"
    file.write_text('[[kubernetes]]\nselector = "app=vllm"\nmodel = "m"\nurl = "http://x"\n')
    with pytest.raises(ConfigError, match="url: follows from the pod"):
        read_pods(file, "local")
