"""A fleet like the stack that a profile was measured of."""

from __future__ import annotations

from math import inf

from kvcache.quality import Quality
from scheduler.measured import Measured, Site
from scheduler.simulator.figures import Goals
from scheduler.simulator.fleet import Fleet, LinkSpec, LocalMachines, RemoteCluster
from scheduler.simulator.prefixes import StoreSpec
from scheduler.values import PolicyValues

KIND = "local"
SNAPSHOT_TOKENS = 2048
"""How often nodes take a snapshot on a prompt's way, unless they are told otherwise."""


def fleet_of(measured: Measured, capacity_bytes: float = inf) -> Fleet:
    """Its nodes, links and prefix caches; each node keeps up to ``capacity_bytes`` of prefixes, which none shares."""
    home, sizes, block = measured.home, measured.sizes, measured.block_tokens
    return Fleet(
        (LocalMachines(KIND, home.nodes + measured.decode_nodes, home.nodes, home.prefill, measured.step_s),),
        tuple(RemoteCluster(site.name, site.nodes, site.prefill, _link(site)) for site in measured.clusters),
        sizes,
        measured.chunk_tokens,
        _link(home),
        codecs=measured.codecs,
        store=StoreSpec(
            block,
            sizes.per_token * block,
            snapshot_bytes=sizes.state + sum(held * nbytes for held, nbytes in sizes.windows),
            snapshot_blocks=max(1, SNAPSHOT_TOKENS // block),
            capacity_bytes=capacity_bytes,
            shared=False,
        ),
    )


def goals_of(measured: Measured) -> Goals:
    """Prefill as the quickest of its sites has it, and the step of a lone stream."""
    sites = [site for site in (measured.home, *measured.clusters) if site.nodes]
    best = min(sites or [measured.home], key=lambda site: site.prefill.seconds(0, measured.chunk_tokens))
    return Goals(best.prefill, measured.step_s[1])


def values_of(measured: Measured) -> PolicyValues:
    """The routing values with the codec by which transfers from afar came."""
    remote = next((site.codec for site in measured.clusters if site.codec), "")
    return PolicyValues(remote_codec=remote) if remote in Quality.EXACT.codecs else PolicyValues()


def _link(site: Site) -> LinkSpec:
    return LinkSpec(site.bytes_per_s, site.rtt_s, site.handling.fixed_s, site.handling.token_s)
