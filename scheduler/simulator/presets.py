"""Fleets and traffic that have a name."""

from __future__ import annotations

from scheduler.case_study import (
    BYTES_PER_S_PER_GBPS,
    HOMOGENEOUS_INSTANCES,
    LINK_GBPS,
    LOCAL_INSTANCES,
    REMOTE_INSTANCES,
)
from scheduler.profiles import CASE_STUDY_KV, H20, H20_DECODE, H200, DecodeProfile, KvSize
from scheduler.simulator.figures import Goals
from scheduler.simulator.fleet import (
    Fleet,
    LinkSpec,
    LocalMachines,
    RemoteCluster,
    curve_of,
    profile_of,
    sizes_of,
    steps_of,
)
from scheduler.throughput import Deployment, LocalNodes, PrefillCluster, PrefillNodes


def deployment_of(fleet: Fleet, output_tokens: float) -> Deployment:
    """A fleet as the throughput model plans with it."""
    return Deployment(
        tuple(
            LocalNodes(
                kind.count,
                profile_of(kind.name, kind.curve),
                DecodeProfile(len(kind.step_s) - 1, kind.step_s[-1]),
            )
            for kind in fleet.local
        ),
        tuple(
            PrefillCluster(
                cluster.name,
                (PrefillNodes(cluster.count, profile_of(cluster.name, cluster.curve)),),
                cluster.link.bytes_per_s,
            )
            for cluster in fleet.clusters
        ),
        KvSize(fleet.sizes.state, fleet.sizes.per_token, fleet.sizes.windows),
        output_tokens,
    )


GOALS = Goals(curve_of(H200), H20_DECODE.step_s)
"""Of the case study."""

REMOTE = "remote"


def hybrid(prefill: int, link_gbps: float = LINK_GBPS) -> Fleet:
    """The case study's fleet: 4 x 8 H200 far away, 8 x 8 H20 at home of which ``prefill`` prefill."""
    return Fleet(
        (LocalMachines("h20", LOCAL_INSTANCES, prefill, curve_of(H20), steps_of(H20_DECODE)),),
        (RemoteCluster(REMOTE, REMOTE_INSTANCES, curve_of(H200), LinkSpec(link_gbps * BYTES_PER_S_PER_GBPS)),),
        sizes_of(CASE_STUDY_KV),
    )


def homogeneous(prefill: int) -> Fleet:
    """The baseline of equal cost: 12 x 8 H20 at home."""
    return Fleet(
        (LocalMachines("h20", HOMOGENEOUS_INSTANCES, prefill, curve_of(H20), steps_of(H20_DECODE)),),
        (),
        sizes_of(CASE_STUDY_KV),
    )
