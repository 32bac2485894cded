"""What a gateway that cannot serve says of it, to anybody who asks."""

from __future__ import annotations

from collections import Counter

from msgspec.structs import replace

from gateway.fleet.fleet import Fleet
from gateway.joining.refusals import LATELY_S, MOST_KEPT, Cause, Refusals, TurnedAway
from gateway.readiness import has_room
from kvcache.control import ModelInfo
from kvcache.wire import Role
from tests.gateway.conftest import Open, Stage

OTHER_MODEL = TurnedAway(Cause.REFUSED, "fingerprint.weights: differs", "fingerprint.weights")


def refusals(now: list[float]) -> Refusals:
    return Refusals(lambda *told: None, lambda: now[0])


async def reason(one: Stage) -> str:
    answer = await one.client.get("/ready")
    assert answer.status_code == 503
    return str(answer.json()["reason"])


async def test_nodes_of_another_model_are_why_there_is_none(stage: Open, info: ModelInfo) -> None:
    one = await stage()
    assert await reason(one) == "no decode node accepts work"
    other = replace(info, fingerprint=info.fingerprint | {"weights": "other"})
    for name in ("secret-1", "secret-2", "secret-1"):
        await one.node(name, Role.DECODE, model=other)
    assert await reason(one) == (
        "no decode node accepts work; in the last 10 minutes 2 nodes were turned away: fingerprint.weights (2)"
    )
    assert "secret" not in await reason(one)
    await one.node("secret-1", Role.PREFILL)
    assert "1 node was turned away: fingerprint.weights (1)" in await reason(one)


def test_a_node_counts_once_and_by_what_kept_it_out_last() -> None:
    kept = refusals([0.0])
    kept.add("d", "local", OTHER_MODEL)
    kept.add("d", "local", TurnedAway(Cause.WRONG_TOKEN, "no"))
    kept.add("e", "local", OTHER_MODEL)
    assert kept.lately() == Counter({"wrong_token": 1, "fingerprint.weights": 1})
    assert kept.lately({"d"}) == Counter({"fingerprint.weights": 1})


def test_what_was_long_ago_is_not_told() -> None:
    now = [0.0]
    kept = refusals(now)
    kept.add("d", "local", OTHER_MODEL)
    now[0] = LATELY_S - 1
    assert kept.lately()
    now[0] = LATELY_S + 1
    assert not kept.lately()


def test_a_flood_of_strangers_is_bounded() -> None:
    kept = refusals([0.0])
    for at in range(2 * MOST_KEPT):
        kept.add(f"d{at}" + "x" * 1000, "local", OTHER_MODEL)
    assert kept.lately().total() == MOST_KEPT
    assert max(map(len, kept._newest)) == 63


async def test_there_is_room_while_a_node_can_speak_one_answer_more(stage: Open) -> None:
    one = await stage()
    fleet = Fleet((), "local")
    assert not has_room(one.gateway.registry, fleet)
    await one.node("d", Role.DECODE)
    assert has_room(one.gateway.registry, fleet)
