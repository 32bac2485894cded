"""One case of an answer: a basis at one split and one threshold, by the throughput model and by simulation.

The simulation runs the gateway's own routing policy over requests drawn from the basis, every one of them equally
often, at exactly its rate. The model says where the limit is, the simulation what waiting there is below it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import isfinite

import msgspec
import numpy as np

from scheduler.controller.assessment import ratio
from scheduler.controller.capacity import Split
from scheduler.controller.observation import Observation
from scheduler.controller.traffic import binned
from scheduler.cost import price
from scheduler.facts import FREE, PrefillCurve, Prices
from scheduler.operating_point import FleetModel, Point
from scheduler.policy import RoutingPolicy
from scheduler.simulator.figures import Figures, Goals, figures
from scheduler.simulator.fleet import (
    Fleet,
    LinkSpec,
    LocalMachines,
    RemoteCluster,
    Settings,
    curve_of,
    sizes_of,
    steps_of,
)
from scheduler.simulator.run import simulate
from scheduler.simulator.traffic import Traffic
from scheduler.throughput import PrefillCluster
from scheduler.values import PolicyValues
from scheduler.what_if.basis import Basis

NO_LIMIT_BYTES_PER_S = 1e12
"""A link of which nothing is known carries that much in a simulation: it never binds."""
NO_THRESHOLD = 1 << 30
HOUR_S = 3600.0


class ModelFigures(msgspec.Struct, frozen=True):
    """By the throughput model, no queueing. ``load`` is ``rate`` over ``point.lambda_max``, ``egress_gbps`` in it at
    ``rate``. ``cost_per_hour`` is the mean over a day's hours at that rate; for what the fleet cannot carry, too.
    """

    point: Point
    rate: float
    load: float
    output_tokens: float
    cost_per_hour: float
    priced: bool


class Case(msgspec.Struct, frozen=True):
    """``simulation`` has KV as raw bytes and TTFT without the network's round trips, as none is known of a plan."""

    name: str
    model: ModelFigures
    simulation: Figures


def model_of(basis: Basis) -> FleetModel:
    """The basis as the throughput model sees it."""
    lengths = binned(np.asarray(basis.lengths, dtype=np.float64))
    return FleetModel(basis.seen, lengths, float(np.mean(basis.outputs)))


def modelled(basis: Basis, model: FleetModel, split: Split, threshold: float, rate: float) -> ModelFigures:
    """One point of it."""
    point = model.point(split, threshold, rate)
    rates = model.rates(split, threshold)
    demand, cost = rates.demand, 0.0
    for cluster, own in zip(basis.seen.clusters, demand.remote, strict=True):
        # long prompts are shared out by what each cluster can take
        part = rate * demand.p * own.theta / demand.theta_prfaas if demand.theta_prfaas else 0.0
        seconds = part * sum(nodes.count for nodes in cluster.nodes) / own.compute if own.compute else 0.0
        cost += _hourly(basis.prices.get(cluster.name, FREE), seconds, part * demand.kv_long_bytes)
    at_home = rate * (1 - demand.p) * rates.n_p / rates.theta_pdp if rates.theta_pdp else 0.0
    cost += _hourly(basis.prices.get(basis.local, FREE), at_home, 0.0)
    return ModelFigures(
        point,
        rate,
        ratio(rate, point.lambda_max),
        model.output_tokens,
        cost,
        any(one.egress_per_gb or one.prefill_per_s for one in basis.prices.values()),
    )


def simulated(
    basis: Basis,
    split: Split,
    threshold: float,
    rate: float,
    requests: int,
    seed: int,
    values: PolicyValues,
    progress: Callable[[int], None],
) -> Figures:
    """The same point, request by request. Equal seeds draw equal requests."""
    fleet = fleet_of(basis.seen, split, basis.chunk_tokens)
    settings = Settings(round(threshold) if isfinite(threshold) else NO_THRESHOLD)
    traffic = _traffic(basis, rate, requests, seed)
    # no codec is simulated, and a way by one that was never measured would not be taken
    policy = RoutingPolicy(msgspec.structs.replace(values, local_codec="raw", remote_codec="raw"))
    return figures(simulate(fleet, settings, policy, traffic, progress=progress), _goals(fleet, basis))


def fleet_of(seen: Observation, split: Split, chunk_tokens: int) -> Fleet:
    """Machines like the observed ones. Those of one remote cluster are taken to be alike: their curves' mean."""
    counts = [sum(node.kind == kind.name for node in seen.nodes) for kind in seen.kinds]
    return Fleet(
        tuple(
            LocalMachines(kind.name, count, n, curve_of(kind.prefill), steps_of(kind.decode))
            for kind, count, n in zip(seen.kinds, counts, split, strict=True)
        ),
        tuple(_remote(cluster) for cluster in seen.clusters),
        sizes_of(seen.kv),
        chunk_tokens=chunk_tokens,
    )


def _remote(cluster: PrefillCluster) -> RemoteCluster:
    count = sum(nodes.count for nodes in cluster.nodes)
    curves = [(nodes.count / count, curve_of(nodes.prefill)) for nodes in cluster.nodes]
    mean = PrefillCurve(
        sum(part * curve.fixed_s for part, curve in curves),
        sum(part * curve.token_s for part, curve in curves),
        sum(part * curve.square_s for part, curve in curves),
    )
    return RemoteCluster(
        cluster.name, round(count), mean, LinkSpec(min(cluster.egress_bytes_per_s, NO_LIMIT_BYTES_PER_S))
    )


def _traffic(basis: Basis, rate: float, requests: int, seed: int) -> Traffic:
    when, what = (np.random.default_rng((seed, stream)) for stream in (0, 1))
    shape = 1 / (basis.cv * basis.cv)
    arrival_s = np.cumsum(when.gamma(shape, 1.0, requests))
    arrival_s *= requests / rate / arrival_s[-1]
    rounds = -(-requests // len(basis.lengths))
    order = np.concatenate([what.permutation(len(basis.lengths)) for _ in range(rounds)])[:requests]
    # a prompt's last token is decode's: the uncached length is what is prefilled
    prompts = np.asarray(basis.lengths, dtype=np.int64)[order] + 1
    return Traffic(arrival_s, prompts, np.asarray(basis.outputs, dtype=np.int64)[order])


def _goals(fleet: Fleet, basis: Basis) -> Goals:
    """TTFT by the quickest kind of prefill node for the mean prompt, TPOT by the quickest full decode batch."""
    tokens = round(float(np.mean(basis.lengths)))
    curves = [kind.curve for kind in fleet.local] + [cluster.curve for cluster in fleet.clusters]
    quickest = min(curves, key=lambda curve: curve.seconds(0, tokens))
    return Goals(quickest, min(kind.step_s[-1] for kind in fleet.local))


def _hourly(prices: Prices, prefill_s: float, egress_bytes: float) -> float:
    """For so much of both each second, the mean over the hours of a day."""
    return sum(price(prices, hour, prefill_s, egress_bytes) for hour in range(24)) / 24 * HOUR_S
