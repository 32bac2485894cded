"""Discovery on machines that were written down, with parts of them missing, and on this one."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from io import StringIO
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from kvcache.topology import MachineReport, MemoryKind, Place, Via
from node.topology.cli import topology
from node.topology.discover import discover
from node.topology.machine import ThisMachine
from node.topology.numa import count_cpus
from node.topology.nvidia import parse_fabrics, parse_matrix, parse_rates
from node.topology.pcie import pcie_bytes_per_s
from node.topology.place import parse_place, read_labels
from node.topology.render import table, tree
from scheduler.topology.graph import Interconnect
from scheduler.topology.paths import Endpoint, Transport
from scheduler.topology.routes import Routes
from tests.node.machines import SHAPES, TextMachine


def found(shape: str, *without: str) -> MachineReport:
    return discover(TextMachine(shape, without), {})


def ways(report: MachineReport) -> Counter[Via]:
    return Counter(link.via for link in report.gpu_links)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_machine_says_where_it_was_taken_from_or_that_it_is_made_up(shape: str) -> None:
    header = TextMachine(shape).header
    assert any(line.startswith("source: https://") for line in header) or "synthetic: all of it" in header


def test_eight_h100_behind_nvswitch_reach_each_other_by_eighteen_links() -> None:
    report = found("h100-nvswitch")
    assert [gpu.name for gpu in report.gpus] == ["NVIDIA H100 80GB HBM3"] * 8
    assert ways(report) == {Via.NVLINK: 28}
    assert {(link.nvlinks, round(link.bytes_per_s / 1e9)) for link in report.gpu_links} == {(18, 478)}
    assert {gpu.fabric for gpu in report.gpus} == {""}, "a fabric of zeros is one machine's own"
    assert [gpu.numa for gpu in report.gpus] == [0] * 4 + [1] * 4
    assert round(report.gpus[0].pcie_bytes_per_s / 1e9, 1) == 63.0
    assert {port.bytes_per_s for port in report.rdma} == {50e9}
    assert report.missing == ()


def test_eight_h20_with_a_port_that_is_down() -> None:
    report = found("h20")
    assert ways(report) == {Via.NVLINK: 28}
    assert [(port.device, port.active) for port in report.rdma] == [("mlx5_0", False)] + [
        (f"mlx5_{n}", True) for n in range(1, 5)
    ]
    assert {(port.layer, port.bytes_per_s) for port in report.rdma} == {("Ethernet", 25e9)}
    assert [gpu.numa for gpu in report.gpus] == [0] * 4 + [1] * 4


def test_four_a100_by_pcie_are_two_pairs_beside_cxl_memory() -> None:
    report = found("a100-pcie")
    assert {(link.a, link.b): link.via for link in report.gpu_links} == {
        (0, 1): Via.NVLINK,
        (2, 3): Via.NVLINK,
        (0, 2): Via.SYS,
        (0, 3): Via.SYS,
        (1, 2): Via.SYS,
        (1, 3): Via.SYS,
    }
    across = next(link for link in report.gpu_links if link.via is Via.SYS)
    assert round(across.bytes_per_s / 1e9, 1) == 31.5
    assert [(node.numa, node.kind, node.nbytes >> 30) for node in report.memory] == [
        (0, MemoryKind.DRAM, 256),
        (1, MemoryKind.DRAM, 256),
        (2, MemoryKind.CXL, 512),
    ]
    assert "nvlink fabric: nvidia-smi -q names none" in report.missing


def test_a_pair_of_machines_on_infiniband_shares_a_subnet() -> None:
    here, there = found("ib-pair-a"), found("ib-pair-b")
    assert {port.subnet for report in (here, there) for port in report.rdma} == {"fe80:0000:0000:0000"}
    assert {(port.layer, port.bytes_per_s) for port in here.rdma} == {("InfiniBand", 25e9)}
    assert here.machine != there.machine
    assert [gpu.numa for gpu in here.gpus] == [1, 0, 3, 2]
    assert {link.bytes_per_s for link in here.gpu_links} == {100e9}


def test_trays_of_an_nvl72_share_a_fabric_and_gpu_memory_is_not_cxl() -> None:
    here, there = found("gb200-a"), found("gb200-b")
    fabrics = {gpu.fabric for report in (here, there) for gpu in report.gpus}
    assert fabrics == {"5f3c9a10-1c2d-4b6e-9d53-0c8f2a7b4e11.32766"}
    assert round(here.gpus[0].nvlink_bytes_per_s / 1e9) == 956
    assert {node.kind for node in here.memory} == {MemoryKind.DRAM}
    assert [node.numa for node in there.memory if node.kind is MemoryKind.GPU] == [2, 10, 18, 26]


@pytest.mark.parametrize("shape", SHAPES)
def test_any_part_may_be_missing_and_is_named(shape: str) -> None:
    parts = {
        "nvidia-smi --query": "gpu",
        "nvidia-smi topo": "gpu links",
        "/sys/class/infiniband": "rdma",
        "/sys/devices/system/node": "numa",
        "/sys/class/net": "tcp",
    }
    for part, word in parts.items():
        report = found(shape, part)
        assert word in {text.partition(":")[0] for text in report.missing}
    nothing = found(shape, "nvidia-smi", "/")
    assert nothing.gpus == nothing.rdma == nothing.memory == nothing.net == ()
    assert nothing.place.host


def test_without_rates_and_sysfs_links_are_still_links() -> None:
    report = found("h100-nvswitch", "nvidia-smi nvlink", "/sys/bus/pci")
    assert {link.bytes_per_s for link in report.gpu_links} == {18 * 25e9}
    assert {gpu.pcie_bytes_per_s for gpu in report.gpus} == {0.0}
    assert [gpu.numa for gpu in report.gpus] == [0] * 4 + [1] * 4


def test_a_matrix_is_read_with_colours_and_spaces_and_rubbish_is_refused() -> None:
    text = (
        "\t\x1b[4mGPU0\tGPU1\tmlx5_0\tCPU Affinity\tNUMA Affinity\x1b[0m\n"
        "GPU0\t X \tPIX\tPHB\t0-7\t\t0\nGPU1\tPIX\t X \tPHB\t0-7\t\t0\nmlx5_0\tPHB\tPHB\t X \n\nLegend:\n"
    )
    assert parse_matrix(text).links == ((0, 1, "PIX"),)
    assert parse_matrix(text.replace("\t", "     ")).numa == {0: 0, 1: 0}
    for rubbish in ("", "No devices were found", "GPU0 GPU1"):
        with pytest.raises(ValueError, match="topo -m"):
            parse_matrix(rubbish)


def test_links_that_are_down_print_no_rate() -> None:
    text = "GPU 0: NVIDIA H100 (UUID: GPU-1)\n\t Link 0: 26.562 GB/s\n\t Link 1: <inactive>\nGPU 1: NVIDIA H100\n"
    assert parse_rates(text) == {0: (26.562e9,), 1: ()}
    assert parse_rates("nothing") == {}


def test_a_fabric_that_is_not_there_is_none() -> None:
    for uuid in ("N/A", "00000000-0000-0000-0000-000000000000"):
        assert parse_fabrics(f"  CliqueId : 0\n  ClusterUUID : {uuid}\n") == [""]


@pytest.mark.parametrize(
    ("speed", "width", "gbytes"), [("2.5 GT/s PCIe", 16, 4.0), ("8.0 GT/s PCIe", 8, 7.9), ("Unknown", 16, 0.0)]
)
def test_a_pcie_link_carries_what_its_generation_codes(speed: str, width: int, gbytes: float) -> None:
    class One(TextMachine):
        def read(self, path: str) -> str | None:
            assert path.startswith("/sys/bus/pci/devices/0000:18:00.0/")
            return speed if path.endswith("max_link_speed") else str(width)

    assert round(pcie_bytes_per_s(One("h20"), "00000000:18:00.0") / 1e9, 1) == gbytes


def test_processors_are_counted_in_lists() -> None:
    assert [count_cpus(text) for text in ("", "0", "0-3,8", "0-55,112-167", "x")] == [0, 1, 5, 112, 0]


def test_a_place_comes_from_flags_and_from_the_downward_api(tmp_path: Path) -> None:
    file = tmp_path / "labels"
    file.write_text('app="x"\ntopology.kubernetes.io/zone="eu-1a"\ntopology.kubernetes.io/region="eu-1"\n')
    assert read_labels(ThisMachine(), str(file)) == {"zone": "eu-1a", "region": "eu-1"}
    assert parse_place("rack=r12,host=h3") == {"rack": "r12", "host": "h3"}
    assert discover(TextMachine("h20"), {"rack": "r12"}).place == Place(rack="r12", host="h20-a")
    for wrong in ("floor=3", "rack", "rack=a b", "rack=" + "x" * 64):
        with pytest.raises(ValueError, match=wrong[:4]):
            parse_place(wrong)
    with pytest.raises(ValueError, match="cannot be read"):
        read_labels(ThisMachine(), str(tmp_path / "none"))
    file.write_text('topology.kubernetes.io/zone="a\\"b"\n')
    with pytest.raises(ValueError, match="zone"):
        read_labels(ThisMachine(), str(file))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_report_is_shown_whole(shape: str) -> None:
    report = found(shape)
    written = StringIO()
    Console(width=160, file=written).print(table(report), tree(report))
    text = written.getvalue()
    for word in (report.gpus[0].name, f"GPU {len(report.gpus) - 1}:", report.place.host, "NUMA 0", "TCP"):
        assert word in text


def test_this_machine_says_whether_it_has_a_gpu_and_gives_host_numa_and_tcp() -> None:
    done = CliRunner().invoke(topology, ["--json", "--place", "zone=z"])
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert report["place"]["zone"] == "z"
    assert report["place"]["host"]
    assert report["gpus"] or "gpu: nvidia-smi lists none" in report["missing"]
    shown = CliRunner().invoke(topology, []).stdout
    assert all(word in shown for word in ("host", "GPUs", "NUMA", "TCP"))
    refused = CliRunner().invoke(topology, ["--place", "floor=3"])
    assert refused.exit_code == 2
    assert "'floor' is none of region, zone, rack, host" in refused.output


def test_no_command_outlives_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("node.topology.machine.COMMAND_TIMEOUT_S", 0.05)
    machine = ThisMachine()
    assert machine.run("sleep", "5") is None
    assert machine.run("false") is None
    assert machine.run("no-such-command") is None
    assert machine.read("/no/such/file") is None
    assert list(machine.names("/no/such/folder")) == []


def test_the_projection_is_printed_with_its_assumptions_and_as_json() -> None:
    shown = CliRunner().invoke(topology, ["project"]).stdout
    for word in ("modelled", "1.342 GB", "1.49 ms", "26.8 ms", "107 ms", "18.00 x", "Assumed", "Elsewhere"):
        assert word in shown
    report = json.loads(CliRunner().invoke(topology, ["project", "--json"]).stdout)
    assert [one["kind"] for one in report["architectures"]] == ["dense, GQA", "MoE, GQA", "MoE, MLA"]
    assert [one["kv_bytes"] for one in report["architectures"]] == [1_342_177_280, 788_529_152, 287_834_112]
    assert report["modelled"] is True
    assert report["where_18x_does_not_hold"]


def test_placements_are_compared_on_made_up_traffic_and_on_a_trace(tmp_path: Path) -> None:
    small = ["placement", "--count", "20", "--domains", "2", "--gpus", "2", "--experts", "8"]
    report = json.loads(CliRunner().invoke(topology, [*small, "--json"]).stdout)
    assert set(report["traces"]) == {"few_experts", "one_domain", "by_topic", "shifting"}
    assert "auto" in CliRunner().invoke(topology, small).stdout
    file = tmp_path / "trace.jsonl"
    line = {"at_s": 0.0, "prompt_tokens": 9, "output_tokens": 9, "cached_on": 0, "experts": [1] * 8}
    file.write_text(json.dumps(line) + "\n")
    done = CliRunner().invoke(topology, [*small, "--json", "--decisions", "--trace", str(file)])
    (decided,) = json.loads(done.stdout)["traces"]["trace.jsonl"]["decisions"]
    assert (decided["gpu"], decided["by"]) == (0, "cache_first")
    assert set(decided["costs"]) == {"cache_first", "expert_domain_first", "expert_load_split"}
    file.write_text('{"at_s": 0}\n')
    refused = CliRunner().invoke(topology, [*small, "--trace", str(file)])
    assert refused.exit_code == 2
    assert "--trace: line 1" in refused.output
    assert CliRunner().invoke(topology, [*small, "--decisions"]).exit_code == 2


def test_routes_between_machines_as_they_were_found() -> None:
    graph = Interconnect()
    for shape in SHAPES:
        assert graph.tell(shape, found(shape)) is None
    routes, nbytes = Routes(graph), 1 << 30
    expected = {
        ("h100-nvswitch", 0, "h100-nvswitch", 7): Transport.NVLINK,
        ("h20", 0, "h20", 7): Transport.NVLINK,
        ("a100-pcie", 0, "a100-pcie", 1): Transport.NVLINK,
        ("a100-pcie", 0, "a100-pcie", 2): Transport.PCIE,
        ("a100-pcie", None, "a100-pcie", None): Transport.SHM,
        ("gb200-a", 0, "gb200-b", 3): Transport.NVLINK,
        ("gb200-a", None, "gb200-b", None): Transport.RDMA,
        ("ib-pair-a", 1, "ib-pair-b", 2): Transport.RDMA,
        ("ib-pair-a", 1, "h20", 2): Transport.TCP,
        ("a100-pcie", 0, "h100-nvswitch", 0): Transport.TCP,
    }
    chosen = {
        pair: routes.choose(Endpoint(pair[0], pair[1]), Endpoint(pair[2], pair[3]), nbytes, 0.0).transport
        for pair in expected
    }
    assert chosen == expected


WORDS = st.sampled_from(
    ["GPU0", "GPU1", " X ", "NV18", "SYS", "0-7", "0", "N/A", "CPU Affinity", "Link 0: 1 GB/s", ":"]
)


@given(st.lists(st.one_of(WORDS, st.text(max_size=6)), max_size=30), st.sampled_from(["\t", "  ", "\n"]))
@settings(max_examples=60, deadline=None)
def test_whatever_nvidia_smi_prints_is_read_or_a_value_error(words: list[str], between: str) -> None:
    text = between.join(words)
    with contextlib.suppress(ValueError):
        parse_matrix(f"\tGPU0\tGPU1\tCPU Affinity\n{text}")
    parse_rates(text)
    parse_fabrics(text)
