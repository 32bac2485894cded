"""What may be claimed of a machine, and the ways between the places of a cluster."""

from __future__ import annotations

import msgspec
import pytest

from kvcache.topology import Gpu, GpuLink, MachineReport, NetPort, Place, RdmaPort, Via
from scheduler.topology.claims import MAX_GPUS, check
from scheduler.topology.graph import Interconnect
from scheduler.topology.paths import ASSUMED_TCP, Endpoint, Transport
from tests.scheduler.topology.machines import NVLINK, PCIE, RDMA, TCP, machine

NAN, INF = float("nan"), float("inf")


def changed(**fields: object) -> MachineReport:
    return msgspec.structs.replace(machine("m"), **fields)


IMPOSSIBLE = {
    "link 0-7": changed(gpu_links=(GpuLink(0, 7, Via.PIX, 0, PCIE),)),
    "link 0-0": changed(gpu_links=(GpuLink(0, 0, Via.PIX, 0, PCIE),)),
    "link 0-1": changed(gpu_links=(GpuLink(0, 1, Via.NVLINK, 18, 9e12),)),
    "gpu_links": changed(gpu_links=(GpuLink(0, 1, Via.PIX), GpuLink(1, 0, Via.SYS))),
    "gpus": changed(gpus=(Gpu(0), Gpu(0)), gpu_links=()),
    "gpu 0 pcie": changed(gpus=(Gpu(0, pcie_bytes_per_s=1e12),), gpu_links=()),
    "gpu 0 nvlink": changed(gpus=(Gpu(0, nvlink_bytes_per_s=-1.0),), gpu_links=()),
    "rdma mlx5_0": changed(rdma=(RdmaPort("mlx5_0", 1, True, NAN),)),
    "net eth0": changed(net=(NetPort("eth0", INF),)),
    "rdma": changed(rdma=(RdmaPort("mlx5_0", 1, True), RdmaPort("mlx5_0", 1, False))),
    "place": changed(place=Place(host="a\nb")),
    "missing": changed(missing=("x" * 1000,)),
}


@pytest.mark.parametrize("field", IMPOSSIBLE)
def test_what_cannot_be_so_is_refused_by_name(field: str) -> None:
    refusal = check("n", IMPOSSIBLE[field])
    assert refusal is not None
    assert (refusal.node_id, refusal.field) == ("n", field)


def test_an_unknown_peer_and_an_impossible_rate_are_said_to_be_that() -> None:
    peer, rate = check("n", IMPOSSIBLE["link 0-7"]), check("n", IMPOSSIBLE["net eth0"])
    assert peer is not None
    assert "unknown peer: no GPU 7" in peer.reason
    assert rate is not None
    assert "impossible rate" in rate.reason


def test_links_that_contradict_their_gpus_or_themselves_are_refused() -> None:
    for link in (GpuLink(0, 1, Via.NVLINK, 18, NVLINK * 2), GpuLink(0, 1, Via.PIX, 4), GpuLink(0, 1, Via.NVLINK, 0)):
        refusal = check("n", changed(gpu_links=(link,)))
        assert refusal is not None
        assert "contradict" in refusal.reason


def test_a_report_without_end_is_refused_before_it_is_read() -> None:
    refusal = check("n", changed(gpus=tuple(Gpu(i) for i in range(MAX_GPUS + 1)), gpu_links=()))
    assert refusal is not None
    assert refusal.field == "gpus"
    assert f"more than {MAX_GPUS}" in refusal.reason


@pytest.mark.parametrize(
    ("field", "report"),
    [
        ("place.rack", machine("m", rack="r2")),
        ("rdma mlx5_0", msgspec.structs.replace(machine("m"), rdma=(RdmaPort("mlx5_0", 1, True, 25e9),))),
        ("gpu 0", msgspec.structs.replace(machine("m"), machine="another")),
        ("gpu 0 fabric", machine("m", fabric="b.1")),
    ],
)
def test_claims_that_contradict_another_nodes_are_refused_and_the_first_stands(
    field: str, report: MachineReport
) -> None:
    graph = Interconnect()
    assert graph.tell("first", machine("m", rack="r1", fabric="a.1")) is None
    refusal = graph.tell("second", report)
    assert refusal is not None
    assert refusal.field == field
    assert "'first'" in refusal.reason
    assert graph.report("second") is None
    graph.forget("first")
    assert graph.tell("second", report) is None


def test_containers_of_one_machine_may_have_hostnames_of_their_own() -> None:
    graph = Interconnect()
    assert graph.tell("a", machine("m")) is None
    assert graph.tell("b", msgspec.structs.replace(machine("m"), place=Place(host="pod-b"))) is None


def test_a_node_that_reports_anew_does_not_contradict_itself() -> None:
    graph = Interconnect()
    assert graph.tell("a", machine("m", rack="r1")) is None
    assert graph.tell("a", machine("m", rack="r2")) is None


def cluster() -> Interconnect:
    graph = Interconnect()
    reports = {
        "nv": machine("nv"),
        "nv2": msgspec.structs.replace(machine("nv"), place=Place(host="other")),
        "pcie": machine("pcie", nvlink=False),
        "bare": machine("bare", gpus=0, rdma=""),
        "roce": machine("roce", rdma="Ethernet"),
        "tray1": machine("tray1", fabric="f.1"),
        "tray2": machine("tray2", fabric="f.1"),
        "tray3": machine("tray3", fabric="f.2"),
    }
    for node, report in reports.items():
        assert graph.tell(node, report) is None
    return graph


N, P, S, R, T = Transport
PAIRS = {
    "GPUs with NVLink": (("nv", 0), ("nv", 1), (N, P, S, T)),
    "GPUs with NVLink, of two nodes on one machine": (("nv", 0), ("nv2", 1), (N, P, S, T)),
    "GPUs without NVLink": (("pcie", 0), ("pcie", 1), (P, S, T)),
    "a GPU and its host": (("nv", 0), ("nv", None), (P, S, T)),
    "one host's memory": (("nv", None), ("nv2", None), (S, T)),
    "GPUs of two machines, one NVLink fabric": (("tray1", 0), ("tray2", 1), (N, R, T)),
    "GPUs of two machines, two cliques of a fabric": (("tray1", 0), ("tray3", 0), (R, T)),
    "GPUs of two machines": (("nv", 0), ("pcie", 1), (R, T)),
    "host memory of two machines in a fabric": (("tray1", None), ("tray2", None), (R, T)),
    "InfiniBand to RoCE": (("nv", 0), ("roce", 0), (T,)),
    "a machine without RDMA": (("nv", 0), ("bare", None), (T,)),
    "a machine that nothing is known of": (("nv", 0), ("stranger", None), (T,)),
}


@pytest.mark.parametrize("name", PAIRS)
def test_the_ways_of_every_class_of_pair(name: str) -> None:
    a, b, expected = PAIRS[name]
    for one, other in ((a, b), (b, a)):
        paths = cluster().paths(Endpoint(*one), Endpoint(*other))
        assert tuple(path.transport for path in paths) == expected


def test_rates_are_those_of_the_slower_end_and_assumed_only_where_nobody_says() -> None:
    graph = cluster()
    graph.tell("slow", machine("slow", net=0.0))
    by = {path.transport: path for path in graph.paths(Endpoint("nv", 0), Endpoint("nv", 1))}
    assert (by[N].bytes_per_s, by[P].bytes_per_s, by[N].assumed) == (NVLINK, PCIE, False)
    far = {path.transport: path for path in graph.paths(Endpoint("nv", 0), Endpoint("slow", 0))}
    assert (far[R].bytes_per_s, far[T].bytes_per_s, far[T].assumed) == (RDMA, ASSUMED_TCP, True)
    near = {path.transport: path for path in graph.paths(Endpoint("nv", 0), Endpoint("pcie", 0))}
    assert near[T].bytes_per_s == TCP


def test_a_port_near_the_gpu_is_taken_before_an_equal_one_far_away() -> None:
    ports = tuple(RdmaPort(f"mlx5_{n}", 1, True, RDMA, "InfiniBand", "s", n) for n in (0, 1))
    down = RdmaPort("mlx5_2", 1, False, RDMA * 4, "InfiniBand", "s", 1)
    graph = Interconnect()
    for node in ("a", "b"):
        graph.tell(node, msgspec.structs.replace(machine(node), rdma=(*ports, down)))
    why = {gpu: graph.paths(Endpoint("a", gpu), Endpoint("b", gpu))[0].why for gpu in (0, 1)}
    assert why == {0: "InfiniBand mlx5_0 to mlx5_0", 1: "InfiniBand mlx5_1 to mlx5_1"}


def test_a_gpu_that_a_node_does_not_have_is_an_error() -> None:
    with pytest.raises(ValueError, match="has no GPU 9"):
        cluster().paths(Endpoint("nv", 9), Endpoint("pcie", 0))
