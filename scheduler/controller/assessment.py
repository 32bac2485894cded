"""How the present split does for the traffic believed in, and what the best one would do: figures, no decisions."""

from __future__ import annotations

from math import ceil, exp, inf

import msgspec

from scheduler.controller.capacity import Capacities, Split
from scheduler.controller.observation import LocalNode, Observation, Stage
from scheduler.controller.settings import ControllerSettings
from scheduler.controller.traffic import Outlook

MOST_REPLICAS = 4096


class Assessment(msgspec.Struct, frozen=True):
    """One look at the whole. Rates are requests per second, splits prefill nodes by kind, gains ratios of Lambda_max.

    ``prefill_now`` counts a node that is being converted as what it becomes; ``prefill_serving`` and
    ``decode_serving`` leave it out. ``threshold_best`` is for the nodes that serve now, ``threshold_then`` for the
    best split. ``gain_surely`` is what is left of ``gain`` if the evidence errs against it. ``load`` is the offered
    rate over ``lambda_now``. Busy shares are means over a stage's nodes. ``desired_prefill`` and ``desired_decode``
    carry the offered rate at the load aimed at, whatever there is now.
    """

    at: float
    kinds: tuple[str, ...]
    counts: Split
    prefill_now: Split
    prefill_serving: Split
    decode_serving: Split
    prefill_best: Split
    threshold_in_force: float
    threshold_best: float
    threshold_then: float
    lambda_now: float
    lambda_best: float
    gain: float
    gain_surely: float
    prefill_limit: float
    decode_limit: float
    bottleneck: str
    rate: float
    load: float
    output_tokens: float
    output_low: float
    output_high: float
    requests: int
    waiting_prefill: int
    waiting_decode: int
    prefill_busy: float
    decode_busy: float
    desired_prefill: int
    desired_decode: int


def capacities(seen: Observation, outlook: Outlook) -> Capacities:
    """What the observed fleet can do for these lengths."""
    counts = [sum(node.kind == kind.name for node in seen.nodes) for kind in seen.kinds]
    return Capacities(seen.kinds, counts, seen.clusters, seen.kv, outlook.lengths)


def assess(
    seen: Observation, outlook: Outlook, fleet: Capacities, settings: ControllerSettings, now: float
) -> Assessment:
    """Judge the present split. There must be at least one local node."""
    split = split_of(seen, [node for node in seen.nodes if node.goal is Stage.PREFILL])
    staying = [node for node in seen.nodes if node.becoming is None]
    serving = split_of(seen, [node for node in staying if node.stage is Stage.PREFILL])
    best = fleet.best(outlook.output_tokens, split)
    prefill_limit, decode_limit = fleet.prefill(split)[0], fleet.decode(split, outlook.output_tokens)
    lambda_now = min(prefill_limit, decode_limit)
    return Assessment(
        at=now,
        kinds=tuple(kind.name for kind in seen.kinds),
        counts=fleet.counts,
        prefill_now=split,
        prefill_serving=serving,
        decode_serving=split_of(seen, [node for node in staying if node.stage is Stage.DECODE]),
        prefill_best=best,
        threshold_in_force=seen.threshold,
        threshold_best=fleet.prefill(serving)[1],
        threshold_then=fleet.prefill(best)[1],
        lambda_now=lambda_now,
        lambda_best=fleet.lambda_max(best, outlook.output_tokens),
        gain=gain(fleet, outlook, split, best),
        gain_surely=gain_surely(fleet, outlook, split, best, settings.sureness),
        prefill_limit=prefill_limit,
        decode_limit=decode_limit,
        bottleneck="prefill" if prefill_limit < decode_limit else "decode",
        rate=outlook.rate,
        load=ratio(outlook.rate, lambda_now),
        output_tokens=outlook.output_tokens,
        output_low=outlook.output_low,
        output_high=outlook.output_high,
        requests=outlook.requests,
        waiting_prefill=seen.waiting_prefill,
        waiting_decode=seen.waiting_decode,
        prefill_busy=_busy(seen, Stage.PREFILL),
        decode_busy=_busy(seen, Stage.DECODE),
        desired_prefill=_desired_prefill(fleet, outlook.rate / settings.replica_load),
        desired_decode=_desired_decode(fleet, seen, outlook, settings),
    )


def split_of(seen: Observation, nodes: list[LocalNode]) -> Split:
    """How many of the nodes are of each kind."""
    return tuple(sum(node.kind == kind.name for node in nodes) for kind in seen.kinds)


def gain(fleet: Capacities, outlook: Outlook, now: Split, then: Split) -> float:
    """Lambda_max then over now, as believed."""
    return ratio(fleet.lambda_max(then, outlook.output_tokens), fleet.lambda_max(now, outlook.output_tokens))


def gain_surely(fleet: Capacities, outlook: Outlook, now: Split, then: Split, sureness: float) -> float:
    """The same where inputs and outputs err against the move: less of what it makes room for."""
    off = exp(sureness * outlook.input_error)
    if sum(then) > sum(now):
        output, scale = outlook.output_high, 1 / off
    else:
        output, scale = outlook.output_low, off
    return ratio(fleet.lambda_max(then, output, scale), fleet.lambda_max(now, output, scale))


def ratio(above: float, below: float) -> float:
    """above / below; 1 where both are nothing."""
    if below > 0:
        return above / below
    return inf if above > 0 else 1.0


def _busy(seen: Observation, stage: Stage) -> float:
    shares = [node.busy for node in seen.nodes if node.stage is stage and node.becoming is None]
    return sum(shares) / len(shares) if shares else 0.0


def _desired_prefill(fleet: Capacities, rate: float) -> int:
    """The fewest local nodes that prefill ``rate`` together with the clusters: of the commonest kind."""
    commonest = max(range(len(fleet.counts)), key=lambda i: fleet.counts[i])
    low, high = 0, MOST_REPLICAS

    def enough(nodes: int) -> bool:
        return fleet.prefill(tuple(nodes if i == commonest else 0 for i in range(len(fleet.counts))))[0] >= rate

    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return low


def _desired_decode(fleet: Capacities, seen: Observation, outlook: Outlook, settings: ControllerSettings) -> int:
    commonest = max(range(len(fleet.counts)), key=lambda i: fleet.counts[i])
    one = seen.kinds[commonest].decode.tokens_per_s / outlook.output_tokens
    return min(MOST_REPLICAS, max(1, ceil(outlook.rate / settings.replica_load / one - 1e-9)))
