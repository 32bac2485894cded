"""What was measured of a running stack: a profile as a file keeps it and the simulator takes it."""

from __future__ import annotations

from enum import StrEnum
from math import isfinite
from typing import Any

import msgspec

from scheduler.facts import CodecFacts, PrefillCurve, SizeFacts

VERSION = 1
MAX_NODES = 100_000
MAX_BATCH = 4096


class Source(StrEnum):
    """PROBES: requests that were sent to be measured. LOG: decision records of whatever traffic there was."""

    PROBES = "probes"
    LOG = "log"


class Handling(msgspec.Struct, frozen=True, gc=False):
    """Seconds that a request takes beside waiting, computing, sending and stepping: in all, and for each token of it.

    Asking, signing, announcing, loading, speaking. It delays a request and keeps no other one waiting.
    """

    fixed_s: float
    token_s: float = 0.0


class Site(msgspec.Struct, frozen=True):
    """The prefill nodes of one cluster, taken as alike, and their way to the decode nodes.

    ``error`` is the median of what ``prefill`` is off by, relative, over ``observations`` prefills. ``codec`` is what
    most transfers came by and ``wire_ratio`` its encoded over raw bytes.
    """

    name: str
    nodes: int
    prefill: PrefillCurve
    handling: Handling
    bytes_per_s: float
    rtt_s: float
    codec: str
    wire_ratio: float
    observations: int
    error: float


class Measured(msgspec.Struct, frozen=True):
    """A stack. ``step_s[n]`` is the time of a decode step with n streams on one node, n from 0 to its batch.

    ``steps_seen`` are the (streams, seconds) that ``step_s`` is a line through; ``codecs`` are what all nodes can do.
    At ``home`` the local prefill nodes prefill or, where ``home.nodes`` is 0, the decode nodes in place.
    """

    version: int
    model: str
    source: Source
    chunk_tokens: int
    block_tokens: int
    sizes: SizeFacts
    codecs: tuple[CodecFacts, ...]
    home: Site
    clusters: tuple[Site, ...]
    decode_nodes: int
    step_s: tuple[float, ...]
    steps_seen: tuple[tuple[float, float], ...]

    def check(self) -> None:
        """Raise ValueError naming the field that no stack has."""
        if self.version != VERSION:
            raise ValueError(f"version: {self.version} is not the one known here, {VERSION}; measure again")
        for field in ("chunk_tokens", "block_tokens"):
            _within(field, getattr(self, field), 1, 1 << 24)
        _within("decode_nodes", self.decode_nodes, 1, MAX_NODES)
        _within("sizes.per_token", self.sizes.per_token, 0, 1 << 40)
        _within("sizes.state", self.sizes.state, 0, 1 << 50)
        if not 2 <= len(self.step_s) <= MAX_BATCH + 1:
            raise ValueError(f"step_s: needs the times of 0 to at least 1 streams, at most {MAX_BATCH}")
        for n, codec in enumerate(self.codecs):
            for name in ("wire_ratio", "encode_bytes_per_s", "decode_bytes_per_s"):
                value = getattr(codec, name)
                if value is not None:
                    _within(f"codecs[{n}].{name}", value, 1e-6, 1e15)
        for n, seconds in enumerate(self.step_s):
            _within(f"step_s[{n}]", seconds, 1e-9, 1e4)
        _check_site("home", self.home, least_nodes=0)
        for n, site in enumerate(self.clusters):
            _check_site(f"clusters[{n}]", site, least_nodes=1)
        names = [self.home.name, *(site.name for site in self.clusters)]
        if len(set(names)) < len(names):
            raise ValueError(f"clusters: a name is there twice among {', '.join(names)}")

    @classmethod
    def of(cls, data: bytes) -> Measured:
        """The profile in a file. Raises ValueError naming the field at fault."""
        try:
            found = msgspec.json.decode(data, type=cls)
        except msgspec.DecodeError as error:
            raise ValueError(str(error)) from error
        found.check()
        return found

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        plain: dict[str, Any] = msgspec.to_builtins(self)
        return plain

    def encoded(self) -> bytes:
        """As a file keeps it; ``of`` reads it."""
        return msgspec.json.format(msgspec.json.encode(self), indent=2) + b"\n"


def _check_site(field: str, site: Site, least_nodes: int) -> None:
    _within(f"{field}.nodes", site.nodes, least_nodes, MAX_NODES)
    for name in ("fixed_s", "token_s", "square_s"):
        _within(f"{field}.prefill.{name}", getattr(site.prefill, name), 0.0, 1e4)
    if site.prefill.token_s + site.prefill.square_s <= 0:
        raise ValueError(f"{field}.prefill: token_s and square_s are both 0, so that any length takes no time")
    for name in ("fixed_s", "token_s"):
        _within(f"{field}.handling.{name}", getattr(site.handling, name), 0.0, 1e4)
    _within(f"{field}.bytes_per_s", site.bytes_per_s, 1.0, 1e15)
    _within(f"{field}.rtt_s", site.rtt_s, 0.0, 1e3)
    _within(f"{field}.wire_ratio", site.wire_ratio, 1e-6, 10.0)


def _within(field: str, value: float, least: float, most: float) -> None:
    if not (isfinite(value) and least <= value <= most):
        raise ValueError(f"{field}: {value} is outside [{least:g}, {most:g}]")
