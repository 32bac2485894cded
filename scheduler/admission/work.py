"""How much work a request is, in seconds of one node: what fairness counts, and by what short and long are told."""

from __future__ import annotations

from collections import OrderedDict

from scheduler.facts import Facts, PrefillCurve
from scheduler.speeds import Ewma

NOMINAL = PrefillCurve.at_rate(1000.0)
"""For nodes that were never measured: then only proportions count."""
OUTPUT_WEIGHT = 2.0
"""Work of a token of the answer, in tokens of a prompt, as in VTC (arXiv 2401.00588)."""
FIRST_GUESS = 128
MOST_ACCOUNTS = 4096


class Yardstick:
    """Measures requests of one moment: the curve and the cached tokens of the node at home that would be quickest."""

    __slots__ = ("_cached", "_curve", "_stop")

    def __init__(self, facts: Facts) -> None:
        self._stop = max(0, facts.request.prompt_tokens - 1)
        home = [node for cluster in facts.clusters if cluster.local for node in cluster.nodes]
        sites = [(node.prefill, node.cached_tokens) for node in home] or [
            (node.prefill, node.cached_tokens) for node in facts.decode_nodes
        ]
        measured = [(curve.seconds(cached, self._stop), curve, cached) for curve, cached in sites if curve is not None]
        if measured:
            _, self._curve, self._cached = min(measured, key=lambda one: one[0])
        else:
            self._curve, self._cached = NOMINAL, max((cached for _, cached in sites), default=0)

    @property
    def uncached_tokens(self) -> int:
        """Of the prompt, to be computed there."""
        return max(0, self._stop - self._cached)

    @property
    def prefill_s(self) -> float:
        """Expected, of the prompt alone."""
        return self._curve.seconds(self._cached, self._stop)

    def expected_s(self, output_tokens: int) -> float:
        """With an answer of so many tokens."""
        return self._seconds(self._cached, output_tokens)

    def spent_s(self, cached_tokens: int, output_tokens: int) -> float:
        """What it came to, by the same measure."""
        return self._seconds(cached_tokens, output_tokens)

    def _seconds(self, cached: int, output_tokens: int) -> float:
        spoken = OUTPUT_WEIGHT * self._curve.token_s * max(1, output_tokens)
        return self._curve.seconds(min(cached, self._stop), self._stop) + spoken


class ExpectedOutputs:
    """How long the answers of each account were of late: what one that sets no bound will probably need."""

    def __init__(self) -> None:
        self._means: OrderedDict[str, Ewma] = OrderedDict()

    def expect(self, account: str, most: int) -> int:
        """Tokens of an answer that may have ``most``."""
        mean = self._means.get(account)
        seen = None if mean is None else mean.value
        return min(most, FIRST_GUESS if seen is None else max(1, round(seen)))

    def saw(self, account: str, tokens: int) -> None:
        """An answer ended."""
        self._means.setdefault(account, Ewma()).add(tokens)
        self._means.move_to_end(account)
        if len(self._means) > MOST_ACCOUNTS:
            self._means.popitem(last=False)
