"""What a node has in files counts as held, and costs what it takes to read."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from gateway.commands.operate import _tier
from gateway.kv_index import KvIndex
from gateway.kv_lookup import Held
from gateway.tier_metrics import MAX_TIERS
from kvcache.blocks import BLOCK_TOKENS
from kvcache.control import KvEvents
from kvcache.held import OwnNames
from kvcache.kv_events import BlockRemoved, BlockStored, decode_batch
from kvcache.tiers.report import TierReport
from kvcache.wire import Role
from scheduler.facts import LinkFacts, PrefillCurve, PrefillNodeFacts, SizeFacts
from scheduler.predict import pace
from scheduler.sizes import kept_bytes
from tests.gateway import test_prefixes
from tests.gateway.conftest import Open
from tests.gateway.test_kv_index import HYBRID, NAMES, batch, session

FIRST = NAMES[:2]


class Sets:
    """What a source holds; told of a block again, it has it once."""

    def __init__(self) -> None:
        self.blocks: set[bytes] = set()
        self.snapshots: set[bytes] = set()

    def stored(self, hashes: Sequence[bytes], parent: bytes | None) -> None:
        self.blocks.update(hashes)

    def removed(self, hashes: Sequence[bytes]) -> None:
        self.blocks.difference_update(hashes)

    def snapshot(self, hash: bytes) -> None:
        self.snapshots.add(hash)

    def removed_snapshot(self, hashes: Sequence[bytes]) -> None:
        self.snapshots.difference_update(hashes)

    def cleared(self) -> None:
        self.blocks.clear()
        self.snapshots.clear()


def stored(names: Sequence[bytes], medium: str, group: int = 0) -> BlockStored:
    at = NAMES.index(names[0])
    parent = NAMES[at - 1] if at and not group else None
    return BlockStored(tuple(names), parent, (), BLOCK_TOKENS, None, medium, None, group_idx=group)


def removed(names: Sequence[bytes], medium: str | None, group: int = 0) -> BlockRemoved:
    return BlockRemoved(tuple(names), medium, group)


def test_a_block_that_moves_is_held_all_the_while() -> None:
    sets = Sets()
    names = OwnNames(BLOCK_TOKENS, sets)
    names.apply([stored(NAMES, "CPU"), stored(NAMES[-1:], "CPU", 1)])
    down = [stored(NAMES, "STORAGE"), removed(NAMES, "CPU")]
    down_too = [stored(NAMES[-1:], "STORAGE", 1), removed(NAMES[-1:], "CPU", 1)]
    names.apply([*down, *down_too])
    assert sets.blocks == set(NAMES)
    assert sets.snapshots == {NAMES[-1]}
    assert names.in_files == (set(NAMES), {NAMES[-1]})
    names.apply([stored(NAMES[:2], "CPU"), removed(NAMES[:2], "STORAGE")])
    assert sets.blocks == set(NAMES)
    assert names.in_files[0] == set(NAMES[2:])
    names.apply([removed(NAMES[2:], "STORAGE"), removed(NAMES[:1], "CPU"), removed(NAMES[-1:], None, 1)])
    assert sets.blocks == {NAMES[1]}
    assert sets.snapshots == set()
    assert names.in_files == (set(), set())


def test_more_than_is_remembered_of_files_is_not_said_to_be_held(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvcache.held.MOST_IN_FILES", 3)
    sets = Sets()
    names = OwnNames(BLOCK_TOKENS, sets)
    names.apply([stored(NAMES, "CPU"), stored(NAMES, "STORAGE"), removed(NAMES, "CPU")])
    assert sets.blocks == set()
    assert names.in_files == (set(), set())


def test_the_sizes_of_what_is_read_are_those_of_the_layout() -> None:
    sizes = SizeFacts(10, ((100, 3),), 7)
    assert kept_bytes(sizes, 64, True) == 640 + 300 + 7
    assert kept_bytes(sizes, 64, False) == 640
    assert kept_bytes(sizes, 0, True) == 307


@pytest.mark.parametrize(("queued_s", "begin_s"), [(0.0, 0.5), (2.0, 2.0)])
def test_reading_begins_when_a_job_comes_and_not_in_its_turn(queued_s: float, begin_s: float) -> None:
    node = PrefillNodeFacts("n", 0, 1, PrefillCurve.at_rate(1000), 640, 640, queued_s=queued_s, reload_s=0.5)
    found = pace(node, LinkFacts(1e9, 0.0), 640, 1000, not_before_s=node.reload_s)
    assert found is not None
    assert found.begin_s == begin_s


def test_what_lies_in_files_is_held_and_known_to_lie_there_over_a_restart_too() -> None:
    index, node = KvIndex(HYBRID, "f"), session()
    index.joined(node)
    down = (stored(FIRST, "STORAGE"), removed(FIRST, "CPU"))
    end = (stored(NAMES[2:3], "CPU", 1), stored(NAMES[2:3], "STORAGE", 1), removed(NAMES[2:3], "CPU", 1))
    index.heard(node, KvEvents(0, batch(stored(NAMES, "CPU"), *down, *end)))
    expected = Held(256, 192, in_files=128, end_in_files=True)
    assert index.matches(NAMES, 0.0) == {"n": expected}
    again = KvIndex(HYBRID, "f")
    again.restore(msgspec.msgpack.decode(msgspec.msgpack.encode(index.dump(0.0)), type=type(index.dump(0.0))), 0.0)
    assert again.matches(NAMES, 0.0) == {"n": expected}
    index.heard(node, KvEvents(1, batch(removed(FIRST[1:], "STORAGE"))))
    assert index.matches(NAMES, 0.0) == {"n": Held(64, 0, in_files=64)}


@pytest.mark.parametrize(("rate", "some"), [(1e3, True), (0.0, False), (-1e9, False), (float("nan"), False)])
async def test_facts_price_what_is_read_by_the_rate_that_the_node_tells(stage: Open, rate: float, some: bool) -> None:
    one = await stage()
    one.register("east")
    prefill = await one.node("p", Role.PREFILL, cluster="east", kv_events=True)
    await one.node("d", Role.DECODE, kv_events=True)
    await test_prefixes.says(one, prefill, 3)
    told = test_prefixes.stored(one, 3)
    (event,) = decode_batch(told.payload).events
    moved = msgspec.structs.replace(event, medium="STORAGE", token_ids=())
    before = one.gateway.kv_index.figures.batches
    await prefill.send(KvEvents(1, batch(moved, removed(event.block_hashes, "CPU"))))
    await one.until(lambda: one.gateway.kv_index.figures.batches > before)
    await prefill.heartbeat(tiers=(TierReport("disk", "STORAGE", read_bytes_per_s=rate),))
    answer = await one.complete(prompt=test_prefixes.IDS, headers={"x-prfaas-route-hint": "remote"})
    record = await one.decision(answer.headers["x-request-id"])
    (node,) = (n for c in record["decision"]["facts"]["clusters"] for n in c["nodes"] if n["node_id"] == "p")
    sizes = record["decision"]["facts"]["request"]["sizes"]
    assert node["held_tokens"] == 192
    assert node.get("reload_s", 0.0) == pytest.approx(192 * sizes["per_token"] / rate if some else 0.0)


async def test_operators_see_tiers_and_what_is_wrong_with_them(stage: Open) -> None:
    one = await stage()
    node = await one.node("p", Role.PREFILL)
    full = TierReport("disk", "STORAGE", "full: No space left on device", 4 << 20, 1 << 20, 3, hits=5, drops=2)
    modelled = TierReport("cxl", "CPU", "modelled: NUMA node 0 is dram memory", 4 << 20)
    await node.heartbeat(tiers=(modelled, full))
    await one.until(lambda: one.gateway.registry.nodes()[0].heartbeat.tiers)
    metrics = (await one.client.get("/metrics")).text
    assert 'prfaas_tier_up{node="p",tier="disk"} 0.0' in metrics
    assert 'prfaas_tier_up{node="p",tier="cxl"} 1.0' in metrics
    assert 'prfaas_tier_bytes{node="p",tier="disk"} 1.048576e+06' in metrics
    assert 'prfaas_tier_hits_total{node="p",tier="disk"} 5.0' in metrics
    (seen,) = (await one.client.get("/v1/nodes")).json()["nodes"]
    shown = _tier(seen["heartbeat"]["tiers"][1])
    assert shown == "disk 1.0 MiB of 4.0 MiB (5 hits, 2 dropped, full: No space left on device)"


async def test_a_node_that_makes_tiers_up_does_not_fill_the_metrics(stage: Open) -> None:
    one = await stage()
    node = await one.node("p", Role.PREFILL)
    twice = TierReport("disk", "STORAGE", read_bytes_per_s=float("nan"))
    await node.heartbeat(tiers=(twice, twice, *(TierReport(f"{n}" * 1000, "STORAGE") for n in range(100))))
    await one.until(lambda: one.gateway.registry.nodes()[0].heartbeat.tiers)
    lines = [
        line for line in (await one.client.get("/metrics")).text.splitlines() if line.startswith("prfaas_tier_up{")
    ]
    assert len(lines) == len(set(lines)) == MAX_TIERS - 1
    assert all(len(line) < 100 for line in lines)
