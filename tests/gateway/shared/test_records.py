"""What gateways tell each other afterwards: decisions, the leader's history, traffic."""

from gateway.shared import records as module
from gateway.shared.records import SharedRecords


async def test_a_decision_is_found_by_either_name_on_any_gateway(link):
    a, b = SharedRecords(link(), "a"), SharedRecords(link(), "b")
    for n in range(3):
        a.decided({"id": f"i{n}", "request_id": "same", "n": n})
    await a.flush()
    assert (await b.find("i1"))["n"] == 1
    assert (await b.find("same"))["n"] == 2
    assert [record["n"] for record in await b.recent(2)] == [2, 1]
    assert await b.find("unknown") is None


async def test_no_more_decisions_are_kept_than_there_may_be(link, monkeypatch):
    monkeypatch.setattr(module, "MOST_DECISIONS", 5)
    a = SharedRecords(link(), "a")
    for n in range(100):
        a.decided({"id": f"i{n}", "request_id": f"r{n}", "n": n})
    await a.flush()
    assert [record["n"] for record in await a.recent(50)] == [99, 98, 97, 96, 95]
    assert await a.find("i3") is None
    assert await a.find("r3") is None


async def test_what_finds_no_room_is_counted(link, monkeypatch):
    monkeypatch.setattr(module, "MOST_WAITING", 2)
    a = SharedRecords(link(), "a")
    for n in range(3):
        a.decided({"id": f"i{n}", "request_id": f"r{n}"})
    assert a.lost == 1


async def test_history_is_heard_once_by_the_others_and_not_by_its_writer(redis, link):
    a, b = SharedRecords(link(), "a"), SharedRecords(link(), "b")
    a.logged("action", "1", b"first")
    a.logged("slot", "20.3", b"second")
    await a.flush()
    assert [(e.kind, e.key, e.row) for e in await b.entries("era")] == [
        ("action", "1", b"first"),
        ("slot", "20.3", b"second"),
    ]
    assert await b.entries("era") == []
    assert await a.entries("era") == []
    redis.say("FLUSHALL")
    a.logged("action", "2", b"third")
    await a.flush()
    assert [e.row for e in await b.entries("another")] == [b"third"]


async def test_traffic_is_taken_once_by_the_leader(link):
    a, leader = SharedRecords(link(), "a"), SharedRecords(link(), "leader")
    a.passed(b"one")
    a.passed(b"two")
    await a.flush()
    assert await leader.take_traffic() == [b"one", b"two"]
    assert await leader.take_traffic() == []
