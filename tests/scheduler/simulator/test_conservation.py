"""Whatever happens to a drawn fleet, every request is somewhere, no count falls below nothing, and bytes add up."""

from __future__ import annotations

import random
from dataclasses import replace
from math import inf, isnan

import pytest

from scheduler.case_study import LENGTHS
from scheduler.policy import RoutingPolicy
from scheduler.simulator.arrivals import Arrivals, synthetic
from scheduler.simulator.figures import figures
from scheduler.simulator.fleet import LOCAL, Conversion, Failure, Fleet, LinkChange, LinkSpec, Role, Settings
from scheduler.simulator.mishaps import Mishaps
from scheduler.simulator.orders import Order, Ordering
from scheduler.simulator.presets import GOALS, hybrid
from scheduler.simulator.records import Records
from scheduler.simulator.roles import RoleKeeper
from scheduler.simulator.telemetry import listen
from scheduler.simulator.traffic import Traffic
from scheduler.simulator.world import World
from scheduler.values import PolicyValues
from tests.scheduler.simulator.fleets import fleet, run, traffic

LOOKS = 200


def drawn(seed: int) -> tuple[Fleet, Settings, Traffic]:
    """A fleet, its traffic, and up to three lost nodes, five role changes and two changes of a link."""
    draw = random.Random(seed)
    requests = synthetic(
        Arrivals(draw.choice([50, 150]), draw.choice([0.5, 2, 4, 10]), draw.choice([1, 4])),
        LENGTHS,
        draw.choice([1, 2, 50, 500]),
        seed,
    )
    end = float(requests.arrival_s[-1])
    where = replace(hybrid(draw.choice([0, 2, 3, 6]), draw.choice([100, 10, 1])), pool_bytes=draw.choice([1e9, inf]))
    homes = [f"{kind.name}-{n}" for kind in where.local for n in range(kind.count)]
    aways = [f"{cluster.name}-{n}" for cluster in where.clusters for n in range(cluster.count)]
    failures = []
    for node in draw.sample(homes + aways, draw.randrange(4)):
        at_s = draw.random() * end
        failures.append(Failure(at_s, node, draw.choice([inf, at_s + 1 + draw.random() * end])))
    return (
        where,
        Settings(
            draw.choice([0, 19_000, 10**9]),
            Ordering(draw.choice(list(Order))),
            draw.choice([1, 30]),
            draw.choice([0, 0.005]),
            draw.random() < 0.5,
            tuple(
                LinkChange(at_s * end, draw.choice([LOCAL, where.clusters[0].name]), draw.choice([0, 1e6, 1e10]))
                for at_s in [draw.random() for _ in range(draw.randrange(3))]
            ),
            tuple(failures),
            tuple(
                Conversion(draw.random() * end, draw.choice(homes), draw.choice(list(Role)))
                for _ in range(draw.randrange(6))
            ),
        ),
        requests,
    )


def check_counts(world: World) -> None:
    for machine in world.machines.values():
        node, decode = machine.prefill, machine.decode
        assert node.queued_tokens >= 0
        assert node.queued_s(world.clock.now) > -1e-6
        assert node.exporting > -1
        assert 0 <= decode.active <= decode.batch
        assert decode.assigned >= decode.active
    for link in world.links.values():
        assert all(flow.sent <= flow.total + 1 for flow in link.flows)


@pytest.mark.parametrize("first", range(0, 80, 20))
def test_nothing_is_lost_negative_or_made_up(first: int) -> None:
    for seed in range(first, first + 20):
        where, settings, requests = drawn(seed)
        records = Records(len(requests))
        world = World(where, settings, RoutingPolicy(PolicyValues(remote_codec="raw")), requests, records)
        Mishaps(world)
        listen(world)
        RoleKeeper(world, None)
        while world.clock.run(float(requests.arrival_s[-1]) + 600, LOOKS) and world.unfinished:
            check_counts(world)
        done = [index for index, at in enumerate(records.done_at) if not isnan(at)]
        assert len(done) == world.done
        assert world.done + records.failed <= len(requests)
        for index in done:
            assert requests.arrival_s[index] <= records.first_at[index] <= records.done_at[index], (seed, index)
        if not world.unfinished:
            assert all(decode.assigned == 0 for decode in world.decoders.values()), seed
            assert all(node.queued_tokens == 0 and abs(node.exporting) < 1 for node in world.prefillers.values()), seed
            carried = sum(link.carried(world.clock.now) for link in world.links.values())
            assert sum(records.wire_bytes) == pytest.approx(carried, rel=1e-6, abs=100), seed


def test_a_prompt_that_was_set_aside_goes_on_where_the_shorter_one_before_it_finds_no_room() -> None:
    where = fleet(pool_bytes=1.2e6, link=LinkSpec(1e9))
    settings = Settings(0, Ordering(Order.SRPT))
    # the second sets the first aside and runs; the third is shorter than what is left, and has no room
    found = run(where, traffic([0.0, 0.05, 0.06], [1000, 100, 500]), settings=settings).records
    assert not any(isnan(at) for at in found.done_at)


def test_a_prompt_beside_streams_is_begun_anew_when_its_decode_node_is_lost() -> None:
    settings = Settings(0, failures=(Failure(0.5, "m-1"),))
    found = run(fleet(prefill=0, decode=2), traffic([0.0, 0.0], [2000, 2000]), settings=settings).records
    assert (found.fell_back, found.failed) == (1, 0)
    assert not any(isnan(at) for at in found.done_at)


def test_egress_is_what_left_in_the_window_and_no_more_than_the_link_carries() -> None:
    where = fleet(remote=4, link=LinkSpec(1e6))
    found = run(where, traffic([0.1 * n for n in range(100)], [1000] * 100), threshold=0)
    assert figures(found, GOALS).egress_gbps == pytest.approx(0.008, rel=0.01)
