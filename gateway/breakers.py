"""Circuit breakers of nodes and of remote clusters, and what each attempt says of those it goes through."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from gateway.attempts import Attempt
from gateway.failures import AttemptFailed, kind_of
from gateway.sessions import NodeSession
from scheduler.breaker import Breaker, BreakerState, BreakerValues, Call
from scheduler.retrying import Failure

MOST_NODES = 4096
"""Whose breakers are kept; those that were looked at longest ago are forgotten first."""
_SAYS_NOTHING = (Failure.REQUEST, Failure.BUSY)
_NUMBERS = {BreakerState.CLOSED: 0, BreakerState.OPEN: 1, BreakerState.HALF_OPEN: 2}
_AT_DECODE = ("node", "load", "decode")


class Breakers:
    """One for each node, which a restarted node begins anew, and one for each remote cluster."""

    def __init__(self, values: BreakerValues) -> None:
        self._values = values
        self._nodes: OrderedDict[str, tuple[str, Breaker]] = OrderedDict()
        self._clusters: dict[str, Breaker] = {}

    def node(self, node: NodeSession) -> Breaker:
        """Of a node, kept over reconnects of the same process."""
        incarnation, breaker = self._nodes.get(node.node_id, ("", None))
        if breaker is None or incarnation != node.incarnation:
            breaker = Breaker(self._values)
            self._nodes[node.node_id] = node.incarnation, breaker
            if len(self._nodes) > MOST_NODES:
                self._nodes.popitem(last=False)
        else:
            self._nodes.move_to_end(node.node_id)
        return breaker

    def cluster(self, name: str) -> Breaker:
        """Of a remote cluster."""
        found = self._clusters.get(name)
        if found is None:
            found = self._clusters[name] = Breaker(self._values)
        return found

    def follow(self, values: BreakerValues) -> None:
        """Other values from now on, for all of them."""
        self._values = values
        for breaker in (*self._clusters.values(), *(breaker for _, breaker in self._nodes.values())):
            breaker.values = values

    def known(self) -> Iterable[tuple[str, str, Breaker]]:
        """``node`` or ``cluster``, the name, and its breaker, of all that were ever asked for."""
        yield from (("cluster", name, breaker) for name, breaker in self._clusters.items())
        yield from (("node", name, breaker) for name, (_, breaker) in self._nodes.items())


class Trial:
    """One attempt, as breakers see it: begun at its dispatch, and to be ended in any case."""

    def __init__(self, breakers: Breakers, attempt: Attempt, local_cluster: str, now: float) -> None:
        self._decode_id = attempt.decode.node_id
        self._decode = breakers.node(attempt.decode).begin(now)
        self._prefill: list[Call] = []
        self._prefill_id = None
        if attempt.leg is not None:
            node = attempt.leg.node
            self._prefill_id = node.node_id
            self._prefill.append(breakers.node(node).begin(now))
            if node.join.cluster != local_cluster:
                self._prefill.append(breakers.cluster(node.join.cluster).begin(now))

    def prefilled(self, now: float) -> None:
        """The answer has begun, so the prefill side did its part."""
        for call in self._prefill:
            call.end(True, now)

    def failed(self, failure: AttemptFailed, now: float) -> None:
        """It failed: one side is blamed, and nothing is said of the other."""
        blamed = self.blamed(failure)
        for call in self._prefill:
            call.end(False if blamed is not None and blamed == self._prefill_id else None, now)
        self._decode.end(False if blamed == self._decode_id else None, now)

    def end(self, whole: bool, now: float) -> None:
        """It is over, with a whole answer or without one. Idempotent, also after the others."""
        for call in (*self._prefill, self._decode):
            call.end(True if whole else None, now)

    def blamed(self, failure: AttemptFailed) -> str | None:
        """The node whose fault it was; None where it was nobody's.

        What goes wrong between both nodes is the sender's, and where nobody said anything the prefill side's.
        """
        if kind_of(failure) in _SAYS_NOTHING or (failure.stage == "queue" and failure.cause == "deadline"):
            return None
        at_decode = failure.node_id == self._decode_id and failure.stage in _AT_DECODE
        return self._decode_id if self._prefill_id is None or at_decode else self._prefill_id


class BreakerGauges:
    """Their states at every scrape, numbered as other gateways do: 0 closed, 1 open, 2 half-open."""

    def __init__(self, breakers: Breakers) -> None:
        self._breakers = breakers

    def collect(self) -> Iterable[Metric]:
        """The families of now."""
        now = asyncio.get_running_loop().time()
        state = GaugeMetricFamily("prfaas_cb_state", "0 closed, 1 open, 2 half-open", labels=["kind", "name"])
        opened = CounterMetricFamily("prfaas_cb_opened", "How often a breaker has opened", labels=["kind", "name"])
        for kind, name, breaker in self._breakers.known():
            state.add_metric([kind, name], _NUMBERS[breaker.state(now)])
            opened.add_metric([kind, name], breaker.opened)
        return [state, opened]
