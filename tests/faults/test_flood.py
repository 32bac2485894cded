"""More requests than all nodes can hold: nobody is turned away who can wait, and one tenant's flood is its own."""

from __future__ import annotations

import json
import statistics
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from tests.models import tiny_model
from tests.stacks import RunningStack, eventually, node, running_stack, some_ids

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

NODES = (node("p", "local", "prefill"), node("d", "local", "decode"))
SHORT, TOKENS = 24, 8


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    room = tmp_path_factory.mktemp("flood")
    with running_stack(tiny_model("llama", room / "llama"), room / "logs", nodes=NODES) as one:
        made = one.http.post("/v1/keys", json={"role": "admin"}).json()
        one.http.headers["authorization"] = f"Bearer {made['key']}"
        yield one


class Tenant:
    """A client with a key of its own and as many connections as it likes."""

    def __init__(self, stack: RunningStack, name: str) -> None:
        made = stack.http.post("/v1/keys", json={"role": "client", "tenant": name}).json()
        headers = {"authorization": f"Bearer {made['key']}"}
        limits = httpx.Limits(max_connections=None)
        self._stack = stack
        self._http = httpx.Client(base_url=stack.stack.url, headers=headers, timeout=100, limits=limits)

    def ask(self, seed: int, tokens: int = SHORT, timeout_s: float = 100.0) -> int:
        body = self._stack.body(some_ids(tokens, seed=seed), TOKENS)
        return self._http.post("/v1/completions", json=body, timeout=timeout_s).status_code

    def latency_s(self, seed: int) -> float:
        began = time.monotonic()
        assert self.ask(seed) == 200
        return time.monotonic() - began


def queued(stack: RunningStack) -> int:
    waiting: int = stack.http.get("/v1/status").json()["queue"]["waiting"]
    return waiting


def idle(stack: RunningStack) -> None:
    assert eventually(lambda: queued(stack) == 0, 20)
    stack.await_idle(20)


def test_two_hundred_short_requests_at_once_are_all_answered(stack: RunningStack) -> None:
    tenant = Tenant(stack, "crowd")
    with ThreadPoolExecutor(200) as senders:
        statuses = list(senders.map(tenant.ask, range(200)))
    assert statuses == [200] * 200
    idle(stack)


def test_a_tenant_beside_one_that_floods_waits_for_a_slot_and_not_for_the_flood(stack: RunningStack) -> None:
    flood, calm = Tenant(stack, "flood"), Tenant(stack, "calm")
    alone = statistics.median(calm.latency_s(1000 + n) for n in range(5))
    over = threading.Event()

    def pour(number: int) -> list[float]:
        took, seed = [], number * 1000
        while not over.is_set():
            seed += 1
            took.append(flood.latency_s(seed))
        return took

    with ThreadPoolExecutor(96) as senders:
        floods = [senders.submit(pour, number) for number in range(2, 98)]
        assert eventually(lambda: queued(stack) > 40, 30)
        beside = statistics.median(calm.latency_s(2000 + n) for n in range(7))
        over.set()
        theirs = statistics.median(took for one in floods for took in one.result())
    print(json.dumps({"alone_s": alone, "beside_s": beside, "flood_s": theirs}))
    assert beside < theirs / 2
    idle(stack)


def test_clients_that_leave_the_queue_leave_nothing_behind(stack: RunningStack) -> None:
    tenant = Tenant(stack, "hasty")

    def hasty(number: int) -> bool:
        try:
            tenant.ask(50_000 + number, tokens=1500, timeout_s=0.2 + 0.02 * (number % 100))
        except httpx.TimeoutException:
            return True
        return False

    with ThreadPoolExecutor(120) as senders:
        left = sum(senders.map(hasty, range(120)))
    assert left > 60
    idle(stack)
    assert tenant.ask(1) == 200


def test_short_prompts_are_not_behind_the_long_ones_that_came_before(stack: RunningStack) -> None:
    tenant = Tenant(stack, "mixed")
    with ThreadPoolExecutor(64) as senders:
        longs = [senders.submit(tenant.ask, 90_000 + number, 1500) for number in range(40)]
        assert eventually(lambda: queued(stack) > 0 or all(one.done() for one in longs), 20)
        took = tenant.latency_s(3000)
        left = sum(not one.done() for one in longs)
        assert {one.result() for one in longs} == {200}
    print(json.dumps({"short_s": took, "longs_left": left}))
    assert left > 20
    idle(stack)
