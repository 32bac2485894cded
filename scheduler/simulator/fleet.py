"""What is simulated: machines, links, and what happens to them. Plain values; nothing here moves."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

from scheduler.facts import CodecFacts, PrefillCurve, SizeFacts
from scheduler.profiles import DecodeProfile, KvSize, PrefillProfile
from scheduler.simulator.orders import FIRST_COME, Ordering
from scheduler.simulator.prefixes import StoreSpec

LOCAL = "local"


class Role(StrEnum):
    """What a machine of the local cluster does."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class LinkSpec:
    """A way to the local decode nodes. What comes that way also takes a time that keeps nobody else waiting."""

    bytes_per_s: float
    rtt_s: float = 0.0
    handling_s: float = 0.0
    handling_token_s: float = 0.0

    def delay_s(self, tokens: int) -> float:
        """From the last byte of a prompt's cache having left to its first step."""
        return self.rtt_s + self.handling_s + self.handling_token_s * tokens


@dataclass(frozen=True, slots=True)
class LocalMachines:
    """``count`` machines of one kind, of which the first ``prefill`` begin as prefill nodes and the others decode.

    ``step_s[n]`` is the time of a decode step with n streams, n from 0 to the batch. Names are ``name`` and a number.
    """

    name: str
    count: int
    prefill: int
    curve: PrefillCurve
    step_s: tuple[float, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.prefill <= self.count:
            raise ValueError(f"machines {self.name!r}: prefill must be 0 to {self.count}, got {self.prefill}")
        if len(self.step_s) < 2 or min(self.step_s) <= 0:
            raise ValueError(f"machines {self.name!r}: step_s needs positive times for 0 and at least 1 stream")


@dataclass(frozen=True, slots=True)
class RemoteCluster:
    """``count`` prefill nodes of one kind, and the link that all of them share."""

    name: str
    count: int
    curve: PrefillCurve
    link: LinkSpec


@dataclass(frozen=True, slots=True)
class Fleet:
    """``chunk_tokens`` is the grid on which prefill is cut; ``codecs`` are what every node can do, truly.

    ``pool_bytes`` bound what a prefill node has exported and not yet sent. ``store`` None: nothing is ever cached.
    """

    local: tuple[LocalMachines, ...]
    clusters: tuple[RemoteCluster, ...]
    sizes: SizeFacts
    chunk_tokens: int = 2048
    local_link: LinkSpec = LinkSpec(50e9)
    pool_bytes: float = inf
    codecs: tuple[CodecFacts, ...] = ()
    store: StoreSpec | None = None

    def __post_init__(self) -> None:
        if sum(kind.count for kind in self.local) < 1:
            raise ValueError("fleet: local holds no machines, so nothing can decode")
        if self.chunk_tokens < 1:
            raise ValueError(f"fleet: chunk_tokens must be positive, got {self.chunk_tokens}")


@dataclass(frozen=True, slots=True)
class LinkChange:
    """From ``at_s`` on the link of ``cluster`` carries ``bytes_per_s``; 0 is a cut."""

    at_s: float
    cluster: str
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Failure:
    """``node`` is lost at ``at_s``, with all that is on it, and back empty at ``back_at_s``."""

    at_s: float
    node: str
    back_at_s: float = inf


@dataclass(frozen=True, slots=True)
class Conversion:
    """``node`` leaves its role at ``at_s`` for the other."""

    at_s: float
    node: str
    to: Role


@dataclass(frozen=True, slots=True)
class Settings:
    """How the fleet is run, the same for every policy.

    ``threshold_tokens`` is the one in force. ``conversion_s`` is what a role change takes once the machine is drained.
    ``chunk_s`` > 0 lets decode nodes prefill beside their streams, which makes each step that much longer.
    ``late_fallback``: a remote way that is later than the gateway's rule allows is tried again at home.
    """

    threshold_tokens: int
    ordering: Ordering = FIRST_COME
    conversion_s: float = 30.0
    chunk_s: float = 0.0
    late_fallback: bool = False
    links: tuple[LinkChange, ...] = ()
    failures: tuple[Failure, ...] = ()
    conversions: tuple[Conversion, ...] = field(default=())


def curve_of(profile: PrefillProfile) -> PrefillCurve:
    """A planning profile, per thousand tokens, as a decision knows it, per token."""
    return PrefillCurve(profile.c0_s, profile.c1_s / 1e3, profile.c2_s / 1e6)


def profile_of(name: str, curve: PrefillCurve) -> PrefillProfile:
    """The other way round."""
    return PrefillProfile(name, curve.fixed_s, curve.token_s * 1e3, curve.square_s * 1e6)


def steps_of(profile: DecodeProfile) -> tuple[float, ...]:
    """A planning profile as step times: the same for any number of streams, as it says no more."""
    return (profile.step_s,) * (profile.batch + 1)


def sizes_of(kv: KvSize) -> SizeFacts:
    """A planning size as a decision knows it."""
    return SizeFacts(round(kv.per_token), tuple(kv.windows), round(kv.fixed))
