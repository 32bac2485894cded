"""Lambda_max of many splits at once: equations 3 to 6 in the ``mean_service`` reading, over every threshold.

The same figures as ``SplitSearch`` gives for observed lengths, from running sums instead of one threshold after
another: the controller asks every few seconds, and the simulator asks for days of them. Between two edges of observed
bins nothing changes, so trying every edge is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import numpy as np

from scheduler.controller.observation import Kind
from scheduler.lengths import FloatArray
from scheduler.observed_lengths import ObservedLengths
from scheduler.profiles import KvSize
from scheduler.throughput import PrefillCluster

Split = tuple[int, ...]
"""How many nodes of each kind prefill; the others decode."""

MOST_SPLITS = 4096


class Capacities:
    """What a fleet can do for one distribution of lengths. ``counts`` are the local nodes of each kind."""

    def __init__(
        self,
        kinds: Sequence[Kind],
        counts: Sequence[int],
        clusters: Sequence[PrefillCluster],
        kv: KvSize,
        lengths: ObservedLengths,
    ) -> None:
        self._kinds = tuple(kinds)
        self.counts = tuple(counts)
        self.thresholds = lengths.thresholds()
        seconds = [np.cumsum(kind.prefill.seconds(lengths.means) * lengths.shares) for kind in kinds]
        self._per_node = 1.0 / np.stack(seconds)
        self._remote = _remote(clusters, kv, lengths)

    def prefill(self, split: Split) -> tuple[float, float]:
        """min(Theta_prfaas / p, Theta_pdp / (1 - p)) at its best threshold, and that threshold."""
        limits = self._limits(np.asarray([split], dtype=np.float64))[0]
        at = int(np.argmax(limits))
        return float(limits[at]), float(self.thresholds[at])

    def decode(self, split: Split, output_tokens: float) -> float:
        """Theta_pdd, requests per second."""
        return sum(
            (count - n) * kind.decode.tokens_per_s / output_tokens
            for n, count, kind in zip(split, self.counts, self._kinds, strict=True)
        )

    def lambda_max(self, split: Split, output_tokens: float, prefill_scale: float = 1.0) -> float:
        """Equation 6. ``prefill_scale`` above 1 makes every prompt that much dearer, on every node and link."""
        return min(self.prefill(split)[0] / prefill_scale, self.decode(split, output_tokens))

    def best(self, output_tokens: float, near: Split) -> Split:
        """The split of the highest Lambda_max; among equals the one with more room for prefill.

        Searches all of them, or those around ``near`` where there are more than ``MOST_SPLITS``. Raises ValueError
        where there is no local node.
        """
        if sum(self.counts) == 0:
            raise ValueError("counts: there is no local node to decode with")
        splits = np.asarray(self._around(near), dtype=np.float64)
        prefill = np.max(self._limits(splits), axis=1)
        per_node = np.asarray([kind.decode.tokens_per_s for kind in self._kinds]) / output_tokens
        decode = (np.asarray(self.counts) - splits) @ per_node
        order = np.lexsort((prefill, np.minimum(prefill, decode)))
        return tuple(int(n) for n in splits[order[-1]])

    def _limits(self, splits: FloatArray) -> FloatArray:
        """Prefill's limit of each split (rows) at each threshold (columns)."""
        local = np.full(
            (len(splits), len(self.thresholds)), np.inf
        )  # at the first threshold no prompt stays, so 0 nodes do
        local[:, 1:] = splits @ self._per_node
        limits: FloatArray = np.minimum(local, self._remote)
        return limits

    def _around(self, near: Split) -> list[Split]:
        reach = max(self.counts)
        while True:
            ranges = [
                range(max(0, n - reach), min(count, n + reach) + 1) for n, count in zip(near, self.counts, strict=True)
            ]
            if reach <= 1 or np.prod([len(one) for one in ranges]) <= MOST_SPLITS:
                return [split for split in product(*ranges) if split != self.counts]
            reach //= 2


def _remote(clusters: Sequence[PrefillCluster], kv: KvSize, lengths: ObservedLengths) -> FloatArray:
    """Theta_prfaas / p at each threshold, infinite at the last, where nothing is longer."""
    total = np.zeros(len(lengths.means))
    nbytes = _rest(kv.nbytes(lengths.means) * lengths.shares)
    for cluster in clusters:
        compute = np.zeros_like(total)
        for nodes in cluster.nodes:
            compute += nodes.count / _rest(nodes.prefill.seconds(lengths.means) * lengths.shares)
        total += np.minimum(compute, cluster.egress_bytes_per_s / nbytes)
    return np.append(total, np.inf)


def _rest(values: FloatArray) -> FloatArray:
    """E[f(L); L > t] at every threshold but the last."""
    return np.cumsum(values[::-1])[::-1]
