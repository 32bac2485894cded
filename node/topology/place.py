"""Where a machine stands: as flags say, or as Kubernetes labels that the downward API wrote into a file."""

from __future__ import annotations

import re
from collections.abc import Mapping

from kvcache.topology import Place
from node.topology.machine import Machine

LABELS = {
    "topology.kubernetes.io/region": "region",
    "topology.kubernetes.io/zone": "zone",
    "topology.kubernetes.io/rack": "rack",
    "kubernetes.io/hostname": "host",
}
FIELDS = tuple(LABELS.values())
_LINE = re.compile(r'([^=\s]+)="((?:[^"\\]|\\.)*)"')
_VALUE = re.compile(r"[A-Za-z0-9]([A-Za-z0-9._-]{0,61}[A-Za-z0-9])?")


def read_labels(machine: Machine, path: str) -> dict[str, str]:
    """The labels of ``LABELS`` in a file of the downward API, a ``key="value"`` a line; others are left alone.

    Raises ValueError where it cannot be read, or names a place by what is no label value.
    """
    text = machine.read(path)
    if text is None:
        raise ValueError(f"{path} cannot be read")
    found = {}
    for line in text.splitlines():
        label = _LINE.fullmatch(line.strip())
        if label is not None and label[1] in LABELS:
            found[LABELS[label[1]]] = _checked(LABELS[label[1]], label[2])
    return found


def parse_place(text: str) -> dict[str, str]:
    """``region=R,zone=Z,rack=K,host=H``, any of them. Raises ValueError naming what is wrong."""
    found = {}
    for part in text.split(","):
        name, _, value = part.partition("=")
        if name not in FIELDS:
            raise ValueError(f"{name!r} is none of {', '.join(FIELDS)}; say for example zone=a,rack=r12")
        found[name] = _checked(name, value)
    return found


def place(machine: Machine, said: Mapping[str, str]) -> Place:
    """What was said; the host's own name where nobody said another."""
    return Place(**{"host": machine.hostname, **said})


def _checked(name: str, value: str) -> str:
    if not _VALUE.fullmatch(value):
        raise ValueError(f"{name}={value[:64]!r}: 1 to 63 letters, digits, dots, dashes or underscores")
    return value
