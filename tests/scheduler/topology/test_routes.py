"""Routes: the cheapest way as far as is known, corrected by what transfers took, never forbidden."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest

from scheduler.topology import routes as module
from scheduler.topology.graph import Interconnect
from scheduler.topology.paths import Endpoint, Transport
from scheduler.topology.routes import MOST_FAILURE_S, Routes
from tests.scheduler.topology.machines import machine
from tests.scheduler.topology.test_graph import PAIRS, cluster

GB = 1 << 30
A, B = Endpoint("a", 0), Endpoint("a", 1)


def one_host() -> Routes:
    graph = Interconnect()
    graph.tell("a", machine("a"))
    return Routes(graph)


def drive(routes: Routes, real_s: Callable[[Transport], float], count: int, now: float, step: float) -> list[Transport]:
    """``count`` transfers, one after another: what carried each."""
    carried = []
    for _ in range(count):
        transport = routes.choose(A, B, GB, now).transport
        carried.append(transport)
        routes.took(A, B, transport, GB, real_s(transport), now)
        now += step
    return carried


def nominal(routes: Routes, transport: Transport) -> float:
    return next(path.seconds(GB) for path in routes.interconnect.paths(A, B) if path.transport is transport)


@pytest.mark.parametrize("name", PAIRS)
def test_the_route_of_every_class_of_pair_is_its_first_way(name: str) -> None:
    a, b, expected = PAIRS[name]
    route = Routes(cluster()).choose(Endpoint(*a), Endpoint(*b), GB, 0.0)
    assert route.transport is expected[0]
    assert route.costs[-1].path.transport is Transport.TCP
    assert all(one.seconds <= other.seconds for one, other in pairwise(route.costs))


def test_a_pair_that_turns_slow_loses_its_place_within_ten_transfers_and_regains_it_after_recovery() -> None:
    routes = one_host()
    fine = {transport: nominal(routes, transport) for transport in (Transport.NVLINK, Transport.PCIE, Transport.SHM)}
    assert set(drive(routes, fine.__getitem__, 20, 0.0, 1.0)) == {Transport.NVLINK}

    slow = fine | {Transport.NVLINK: 30 * fine[Transport.NVLINK]}
    turned = drive(routes, slow.__getitem__, 10, 20.0, 1.0)
    assert turned[0] is Transport.NVLINK
    assert turned[-1] is Transport.PCIE
    # while it stays slow it is only tried now and then
    later = drive(routes, slow.__getitem__, 600, 30.0, 1.0)
    assert 0 < later.count(Transport.NVLINK) < 60
    # it recovers: it is tried, and keeps its place
    recovered = drive(routes, fine.__getitem__, 120, 630.0, 1.0)
    back = recovered.index(Transport.NVLINK)
    assert set(recovered[back:]) == {Transport.NVLINK}
    assert set(drive(routes, fine.__getitem__, 10, 750.0, 1.0)) == {Transport.NVLINK}


def test_what_is_a_little_slow_keeps_its_place() -> None:
    routes = one_host()
    seconds = {t: nominal(routes, t) * (3 if t is Transport.NVLINK else 1) for t in (Transport.NVLINK, Transport.PCIE)}
    assert set(drive(routes, seconds.__getitem__, 50, 0.0, 0.1)) == {Transport.NVLINK}


def test_a_rate_that_is_measured_again_and_again_becomes_the_cost() -> None:
    routes = one_host()
    for second in range(10):
        routes.measured(A, B, Transport.TCP, 1e9, float(second))
    cost = next(c for c in routes.choose(A, B, GB, 9.0).costs if c.path.transport is Transport.TCP)
    assert cost.seconds == pytest.approx(GB / 1e9, rel=0.1)


def test_a_failed_transport_falls_to_the_next_and_is_remembered_for_a_while() -> None:
    routes = one_host()
    routes.failed(A, B, Transport.NVLINK, 0.0)
    assert routes.choose(A, B, GB, 0.0).transport is Transport.PCIE
    routes.failed(A, B, Transport.PCIE, 1.0)
    route = routes.choose(A, B, GB, 1.0)
    assert route.transport is Transport.SHM
    assert {cost.path.transport for cost in route.costs} >= {Transport.NVLINK, Transport.PCIE}, "nothing is forbidden"
    assert routes.choose(A, B, GB, 600.0).transport is Transport.NVLINK


def test_failures_in_a_row_keep_a_way_back_longer_and_one_success_clears_them() -> None:
    routes = one_host()
    penalties = []
    for _ in range(8):
        routes.failed(A, B, Transport.NVLINK, 0.0)
        cost = next(c for c in routes.choose(A, B, GB, 0.0).costs if c.path.transport is Transport.NVLINK)
        penalties.append(cost.failures_s)
    assert penalties[:4] == [2.0, 4.0, 8.0, 16.0]
    assert penalties[-1] == MOST_FAILURE_S
    routes.took(A, B, Transport.NVLINK, GB, nominal(routes, Transport.NVLINK), 1.0)
    assert routes.choose(A, B, GB, 1.0).transport is Transport.NVLINK


def test_when_everything_failed_there_is_still_a_route() -> None:
    routes = one_host()
    for transport in Transport:
        routes.failed(A, B, transport, 0.0)
    assert routes.choose(A, B, GB, 0.0).costs


def test_only_what_both_ends_have_is_offered() -> None:
    routes = one_host()
    assert routes.choose(A, B, GB, 0.0, (Transport.TCP, Transport.SHM)).transport is Transport.SHM
    with pytest.raises(ValueError, match="none of rdma connects a and a"):
        routes.choose(A, B, GB, 0.0, (Transport.RDMA,))


def test_a_small_transfer_takes_what_begins_soonest_and_teaches_nothing() -> None:
    routes = one_host()
    routes.took(A, B, Transport.NVLINK, 1000, 5.0, 0.0)
    for nonsense in (0.0, -1.0, float("nan"), float("inf")):
        routes.took(A, B, Transport.NVLINK, GB, nonsense, 0.0)
        routes.measured(A, B, Transport.NVLINK, nonsense, 0.0)
    assert {cost.slowdown for cost in routes.choose(A, B, GB, 0.0).costs} == {1.0}
    assert routes.choose(A, B, 1, 0.0).transport in (Transport.NVLINK, Transport.SHM)


def test_ways_that_are_not_in_the_graph_are_not_kept_and_a_lost_nodes_are_forgotten() -> None:
    routes = one_host()
    routes.failed(A, B, Transport.RDMA, 0.0)
    routes.took(A, B, Transport.RDMA, GB, 1.0, 0.0)
    assert not routes._seen
    routes.failed(A, B, Transport.NVLINK, 0.0)
    routes.forget("a")
    assert routes.choose(A, B, GB, 0.0).transport is Transport.NVLINK


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAYS", 4)
    routes = one_host()
    for n in range(9):
        routes.failed(Endpoint(f"n{n}"), B, Transport.TCP, 0.0)
    assert len(routes._seen) == 4
