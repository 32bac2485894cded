"""KV beside iperf3 and two transfer engines: one machine, one run, by turns, medians.

    python -m tests.bench.kv_side_by_side [--model DIR] [--mooncake PYTHON] [--nixl PYTHON] [--bytes N] [--rounds 3]

PYTHON is the interpreter of an environment with mooncake-transfer-engine-non-cuda, or nixl-cu12 and torch. The places
are the loopback and a link of 1 Gbps and 30 ms, without loss and with 0.1 %. Gbit/s are of raw KV from asking to the
commit; for iperf3, of its steady state.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tests.bench.kv_processes import Here, KvServing, Place, cpu_s, kv_serving
from tests.bench.peer_reads import await_file
from tests.wan.direction import LinkSettings
from tests.wan.link import wide_area

READS = 3
GIB = 1 << 30
LIBRARY = Path(__file__).with_name("peer_reads.py")
LINK = LinkSettings(rate_bps=1e9, delay_s=0.015)
PLACES = {"loopback": None, "no-loss": LINK, "loss": replace(LINK, loss=0.001)}
OWN_SYSFS = ("unshare", "--mount", "sh", "-c", 'mount -t sysfs none /sys && exec "$@"', "sh")
"""UCX looks for network devices in /sys, which shows those of the namespace that mounted it."""


class Measured(NamedTuple):
    """Gbit/s, and processor seconds of both ends together for a GiB of raw KV (None where nobody counted)."""

    gbps: float
    cpu_s_per_gib: float | None


Measure = Callable[[], Measured]


@contextlib.contextmanager
def iperf3(near: Place, far: Place) -> Iterator[Measure]:
    """Four connections from ``near`` to ``far`` for four seconds, the first of five left out."""
    server = near.start(("iperf3", "-s", "-B", near.address), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    words = ("iperf3", "-c", near.address, "-R", "-J", "-O", "1", "-t", "4", "-P", "4")

    def measure() -> Measured:
        out, _ = far.start(words, stdout=subprocess.PIPE, text=True).communicate(timeout=60)
        return Measured(float(json.loads(out)["end"]["sum_received"]["bits_per_second"]) / 1e9, None)

    try:
        yield measure
    finally:
        server.terminate()
        server.wait(10)


def fetching(serving: KvServing, far: Place, codec: str) -> Measure:
    """The median of a few fetches over warm connections."""

    def measure() -> Measured:
        before = cpu_s(serving.pid)
        found = serving.fetch(far, codec, "--repeats", str(READS))
        served_s = (cpu_s(serving.pid) - before) / (READS + 1)
        if not found["verified"]:
            raise RuntimeError("what arrived is not what was offered")
        return Measured(found["goodput_gbps"], (served_s + found["cpu_s"]) * GIB / found["bytes_raw"])

    return measure


def library(near: Place, far: Place, nbytes: int, name: str, python: str) -> Measure:
    """The median of a few reads by another library, after one to warm up."""
    seeing = () if isinstance(near, Here) else OWN_SYSFS
    quiet = {"env": os.environ | {"UCX_TLS": "tcp"}, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}

    def measure() -> Measured:
        with tempfile.TemporaryDirectory() as directory:
            room = Path(directory)
            command, end = (*seeing, python, str(LIBRARY), name), (directory, str(nbytes), str(READS))
            offering = near.start((*command, "offer", near.address, *end), **quiet)
            try:
                await_file(room / "offer")
                before = cpu_s(offering.pid)
                far.start((*command, "read", far.address, *end), **quiet).wait(300)
                offered_s = (cpu_s(offering.pid) - before) / (READS + 1)
                found = json.loads((room / "done").read_bytes())
            finally:
                offering.kill()
                offering.wait(10)
        seconds, read_s = (statistics.median(each) for each in zip(*found, strict=True))
        return Measured(nbytes * 8 / seconds / 1e9, (offered_s + read_s) * GIB / nbytes)

    return measure


def compare(near: Place, far: Place, options: argparse.Namespace) -> dict[str, Measured]:
    """All candidates at one place: medians over the rounds, in each of which every one is measured once."""
    with contextlib.ExitStack() as stack:
        plain = stack.enter_context(kv_serving(near, options.bytes, options.model))
        tls = stack.enter_context(kv_serving(near, options.bytes, options.model, tls=True))
        candidates = {
            "iperf3 -P 4": stack.enter_context(iperf3(near, far)),
            "prfaas raw": fetching(plain, far, "raw"),
            "prfaas raw, TLS": fetching(tls, far, "raw"),
            "prfaas lossless": fetching(plain, far, "lossless"),
        }
        for name, python in (("mooncake", options.mooncake), ("nixl", options.nixl)):
            if python is not None:
                candidates[name] = library(near, far, options.bytes, name, python)
        found: dict[str, list[Measured]] = {name: [] for name in candidates}
        for _ in range(options.rounds):
            for name, measure in candidates.items():
                found[name].append(measure())
    return {name: _median(each) for name, each in found.items()}


def _median(found: list[Measured]) -> Measured:
    costs = [one.cpu_s_per_gib for one in found if one.cpu_s_per_gib is not None]
    return Measured(statistics.median(one.gbps for one in found), statistics.median(costs) if costs else None)


def main() -> None:
    """Print a line per place and candidate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="capture the KV from this model; default: made-up KV")
    parser.add_argument("--mooncake", metavar="PYTHON")
    parser.add_argument("--nixl", metavar="PYTHON")
    parser.add_argument("--bytes", type=int, default=256 << 20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--places", nargs="*", choices=PLACES, default=list(PLACES))
    options = parser.parse_args()
    for place in options.places:
        with contextlib.ExitStack() as stack:
            link = PLACES[place]
            wan = stack.enter_context(wide_area(link)) if link is not None else None
            near, far = (wan.near, wan.far) if wan is not None else (Here(), Here())
            found = compare(near, far, options)
        for name, (gbps, cost) in found.items():
            cpu = f"{cost:6.2f} CPU s/GiB" if cost is not None else ""
            print(f"{place:9} {name:16} {gbps:8.3f} Gbit/s {cpu}", flush=True)


if __name__ == "__main__":
    main()
