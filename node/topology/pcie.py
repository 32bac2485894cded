"""What a device's PCIe link can carry, from sysfs."""

from __future__ import annotations

import re

from node.topology.machine import Machine

_SPEED = re.compile(r"(\d+(?:\.\d+)?) GT/s")
_OLD_GENERATION_GT = 5.0
"""Up to here (generations 1 and 2) 8 of 10 bits are data, from generation 3 on 128 of 130."""


def pci_address(bus: str) -> str:
    """A bus id as nvidia-smi prints it (00000000:18:00.0), as sysfs names it (0000:18:00.0)."""
    domain, _, rest = bus.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def pcie_bytes_per_s(machine: Machine, bus: str) -> float:
    """One direction, framing within packets not counted; 0 where sysfs does not say.

    The highest speed that the device can train to, for an idle GPU saves power with a slower one; the width that it has
    now, for lanes that are not there do not come back.
    """
    folder = f"/sys/bus/pci/devices/{pci_address(bus)}"
    speed = _SPEED.search(machine.read(f"{folder}/max_link_speed") or "")
    width = machine.read(f"{folder}/current_link_width") or ""
    if speed is None or not width.isdecimal():
        return 0.0
    per_lane = float(speed[1]) * 1e9 / 8
    return int(width) * per_lane * (0.8 if float(speed[1]) <= _OLD_GENERATION_GT else 128 / 130)
