"""The best threshold t and the best split N_p : N_d of a deployment, by exhaustive search (equations 7 and 8).

Every threshold that the distribution proposes is tried, then the neighbourhood of the best one ever more finely. For a
given split t is where equation 7 holds, or as near as the distribution allows, whether or not decode is what limits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product

import numpy as np

from scheduler.lengths import LengthDistribution
from scheduler.throughput import Demand, Deployment, Rates, Reading, divide, rates

_ROUNDS = 6
_POINTS = 17
_BETTER = 1e-12


class SplitSearch:
    """Searches one deployment, one distribution, one reading; what a threshold makes of the traffic is kept."""

    def __init__(self, deployment: Deployment, lengths: LengthDistribution, reading: Reading) -> None:
        self._deployment = deployment
        self._lengths = lengths
        self._reading = reading
        self._demands: dict[float, Demand] = {}

    def at(self, t: float, prefill: Sequence[float]) -> Rates:
        """The rates at a given threshold and split."""
        return rates(self._deployment, self._demand(t), prefill)

    def threshold(self, prefill: Sequence[float]) -> Rates:
        """The best threshold for a given split: the one at which both prefill sides are full at the same rate."""
        return self._best(lambda t: self.at(t, prefill), lambda found: found.prefill_limit)

    def splits(self) -> tuple[Rates, ...]:
        """Every whole split, each at its best threshold; one decode node at least."""
        counts = [range(nodes.count + 1) for nodes in self._deployment.local]
        whole = tuple(nodes.count for nodes in self._deployment.local)
        return tuple(self.threshold(prefill) for prefill in product(*counts) if prefill != whole)

    def split(self) -> Rates:
        """The whole split of the highest Lambda_max; among equals the one with more room for prefill."""
        return max(self.splits(), key=lambda found: (found.lambda_max, found.prefill_limit))

    def fractional(self) -> Rates:
        """The bound that no split reaches: local nodes divide their time freely between the roles."""
        return self._best(
            lambda t: rates(self._deployment, self._demand(t), _shared(self._deployment, self._demand(t))),
            lambda found: found.lambda_max,
        )

    def _demand(self, t: float) -> Demand:
        if t not in self._demands:
            self._demands[t] = divide(self._deployment, self._lengths, t, self._reading)
        return self._demands[t]

    def _best(self, point: Callable[[float], Rates], value: Callable[[Rates], float]) -> Rates:
        thresholds = self._lengths.thresholds()
        tried = [point(float(t)) for t in thresholds]
        index = int(np.argmax([value(found) for found in tried]))
        best = tried[index]
        low, high = float(thresholds[max(index - 1, 0)]), float(thresholds[min(index + 1, len(thresholds) - 1)])
        for _ in range(_ROUNDS):
            step = (high - low) / (_POINTS - 1)
            for i in range(1, _POINTS - 1):
                found = point(low + i * step)
                if value(found) > value(best) * (1 + _BETTER):
                    best = found
            low, high = max(low, best.demand.t - step), min(high, best.demand.t + step)
        return best


def _shared(deployment: Deployment, demand: Demand) -> tuple[float, ...]:
    """How much of each kind prefills so that the local stages are full together.

    Kinds prefill in the order of what they are comparatively better at; in that order the prefill side's limit rises
    and the decode side's falls, so the best point is where they meet, within one kind.
    """
    order = sorted(
        range(len(deployment.local)),
        key=lambda i: demand.short_s[i] * deployment.local[i].decode.tokens_per_s,
    )
    prefill = [0.0] * len(deployment.local)
    for i in order:
        nodes = deployment.local[i]
        prefill[i] = float(nodes.count)
        full = rates(deployment, demand, prefill)
        if _spare(full, demand) >= 0:
            prefill[i] = 0.0
            none = rates(deployment, demand, prefill)
            rise = _spare(full, demand) - _spare(none, demand)
            prefill[i] = nodes.count * -_spare(none, demand) / rise if rise > 0 else 0.0
            break
    return tuple(
        min(max(count, 0.0), float(nodes.count)) for count, nodes in zip(prefill, deployment.local, strict=True)
    )


def _spare(found: Rates, demand: Demand) -> float:
    """Short prompts per second that prefill could take beyond what decode lets through; linear in the split."""
    return found.theta_pdp - (1 - demand.p) * found.theta_pdd
