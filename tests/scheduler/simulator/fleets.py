"""Small fleets and traffic whose behaviour can be worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scheduler.facts import PrefillCurve, SizeFacts
from scheduler.policy import RoutingPolicy
from scheduler.simulator.baselines import Static
from scheduler.simulator.fleet import Fleet, LinkSpec, LocalMachines, RemoteCluster, Settings
from scheduler.simulator.run import Run, simulate
from scheduler.simulator.traffic import Traffic
from scheduler.values import PolicyValues

WIDE = LinkSpec(1e9)
KILOBYTE_A_TOKEN = SizeFacts(per_token=1000)
MILLISECOND_A_TOKEN = PrefillCurve(0.0, 1e-3)
RAW = RoutingPolicy(PolicyValues(remote_codec="raw"))


def fleet(
    prefill: int = 1,
    decode: int = 1,
    remote: int = 0,
    batch: int = 4,
    step_s: float = 0.01,
    link: LinkSpec = WIDE,
    sizes: SizeFacts = KILOBYTE_A_TOKEN,
    **more: object,
) -> Fleet:
    """Local machines ``m-0``, ... and a cluster ``far`` whose nodes are twice as fast."""
    local = LocalMachines("m", prefill + decode, prefill, MILLISECOND_A_TOKEN, (step_s,) * (batch + 1))
    clusters = (RemoteCluster("far", remote, PrefillCurve(0.0, 0.5e-3), link),) if remote else ()
    return Fleet((local,), clusters, sizes, chunk_tokens=100, **more)  # type: ignore[arg-type]


def traffic(
    arrivals: Sequence[float],
    prompts: Sequence[int],
    outputs: Sequence[int] | int = 1,
    blocks: tuple[tuple[int, ...], ...] = (),
    block_tokens: int = 0,
) -> Traffic:
    """Requests of which ``prompts`` tokens are prefilled."""
    output = [outputs] * len(arrivals) if isinstance(outputs, int) else outputs
    return Traffic(np.array(arrivals, float), np.array(prompts) + 1, np.array(output), blocks, block_tokens)


def run(
    where: Fleet, requests: Traffic, threshold: float = float("inf"), settings: Settings | None = None, **more: object
) -> Run:
    """With a fixed threshold, and so with nothing to weigh up."""
    return simulate(where, settings or Settings(0), Static(RAW, threshold), requests, **more)  # type: ignore[arg-type]
