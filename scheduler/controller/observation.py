"""What the controller is told at each step: who is there, what came in, what went out since the step before."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import msgspec

from scheduler.profiles import DecodeProfile, KvSize, PrefillProfile
from scheduler.throughput import PrefillCluster


class Stage(StrEnum):
    """What a local node does."""

    PREFILL = "prefill"
    DECODE = "decode"

    @property
    def other(self) -> Stage:
        """What it would do after a conversion."""
        return Stage.DECODE if self is Stage.PREFILL else Stage.PREFILL


class LocalNode(msgspec.Struct, frozen=True, gc=False):
    """One local node. ``becoming`` is the stage that a conversion under way leads to, None where there is none.

    ``work`` orders nodes by how soon they can be empty: tokens waiting or still to be spoken there, in any unit that
    is the same for all nodes of a stage. ``busy`` is the share of its capacity in use, 0 to 1. ``convertible`` is False
    where a conversion could not work (a port that is missing, say), and nothing is proposed for it.
    """

    node_id: str
    kind: str
    stage: Stage
    becoming: Stage | None = None
    work: float = 0.0
    busy: float = 0.0
    convertible: bool = True

    @property
    def goal(self) -> Stage:
        """The stage it is in, or is on its way to."""
        return self.becoming or self.stage


class Spoken(msgspec.Struct, frozen=True, gc=False):
    """What answers that began together, at ``begun`` on the controller's clock, spoke and ended since the last step.

    Told apart by when they began, because after a change the answers of before go on for minutes.
    """

    begun: float
    tokens: int
    ends: int


@dataclass(frozen=True, slots=True)
class Kind:
    """Nodes that are alike, and what one of them can do in either stage."""

    name: str
    prefill: PrefillProfile
    decode: DecodeProfile


@dataclass(frozen=True, slots=True)
class Observation:
    """Everything since the step before.

    ``lengths`` are the uncached tokens of each request that arrived (0 where all was cached), ``spoken`` what decode
    nodes said and finished (a ``Ledger`` keeps account of it). ``waiting_prefill`` and ``waiting_decode`` are requests
    that no node has begun. ``failed`` names nodes whose conversion was rolled back.
    """

    nodes: tuple[LocalNode, ...]
    kinds: tuple[Kind, ...]
    clusters: tuple[PrefillCluster, ...]
    kv: KvSize
    threshold: float
    lengths: tuple[int, ...] = ()
    spoken: tuple[Spoken, ...] = ()
    waiting_prefill: int = 0
    waiting_decode: int = 0
    failed: tuple[str, ...] = ()

    @property
    def tokens(self) -> int:
        """All that was spoken."""
        return sum(part.tokens for part in self.spoken)

    @property
    def ends(self) -> int:
        """All answers that ended."""
        return sum(part.ends for part in self.spoken)

    def __post_init__(self) -> None:
        known = {kind.name for kind in self.kinds}
        for node in self.nodes:
            if node.kind not in known:
                raise ValueError(f"nodes: {node.node_id!r} is of kind {node.kind!r}, which kinds does not hold")
