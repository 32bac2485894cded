"""Where to prefill: facts in, decision out. Live gateway, replay, report and simulator use this same object.

Prefill covers N - 1 tokens: the decode engine runs the last prompt token itself. The threshold tests the local compute
increment, N - 1 - the prefix cached here; where bandwidth is abundant, that cached anywhere it can be moved from. A
prompt at or below it stays, or where the threshold bends, stays unless there is a queue and another way costs less. Of
the ways that a longer one may take, the one of least cost is taken (``Option.cost_s``).

Three bounds, in this order: where a prompt may be at all (``permits``), which nothing overrides; what a client with a
permission asks for; and that a remote way is neither predicted slower than the local one nor congested. What was never
measured cannot be compared: it is tried, by one request at a time, and so comes to be measured.

What is long and stays all the same comes last at home (``admission.holding``), which no prediction knows. So a home
that has kept it waiting and is still busy counts as slower by as much again, until a remote way is quicker after all;
and a congested link carries one at a time of those that wait.

What a circuit breaker suspends is no way; only where all decode nodes are suspended is one taken all the same, for a
refusal is certain and its failure is not.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from scheduler.admission.holding import busy
from scheduler.decision import Bar, Decision, Option, Reason
from scheduler.facts import ClusterFacts, Facts, LinkFacts, PrefillNodeFacts, RouteHint
from scheduler.moves import Source, abundant, longest
from scheduler.options import Options
from scheduler.permits import carries, decodes_here, may_hold
from scheduler.picking import decode_node, prefill_node
from scheduler.values import PolicyValues


class RoutingPolicy:
    """Decides where a request is prefilled and decoded. Holds values only; equal facts give equal decisions."""

    def __init__(self, values: PolicyValues | None = None) -> None:
        self.values = values or PolicyValues()

    def decide(self, facts: Facts) -> Decision:
        """Choose among the ways at home and the reachable, permitted remote ones."""
        case = _Case.of(facts, self.values)
        return case.decide() if isinstance(case, _Case) else case

    def fall_back(self, facts: Facts) -> Decision:
        """Choose the local way for a request whose first attempt failed or was late."""
        case = _Case.of(facts, self.values)
        return case.fall_back() if isinstance(case, _Case) else case


class _Case:
    """One request that can be decoded here, and its options."""

    __slots__ = (
        "decode",
        "facts",
        "local",
        "local_alive",
        "options",
        "others",
        "picked",
        "request",
        "stop",
        "suspended",
        "values",
    )

    def __init__(self, facts: Facts, values: PolicyValues, options: Options) -> None:
        self.facts = facts
        self.values = values
        self.request = facts.request
        self.options = options
        self.decode = options.decode
        self.stop = options.stop
        self.local: ClusterFacts | None = None
        self.others: list[ClusterFacts] = []
        self.suspended: list[tuple[ClusterFacts, PrefillNodeFacts]] = []
        for cluster in facts.clusters:
            if cluster.local:
                self.local = self._unsuspended(cluster)
            elif carries(cluster) and may_hold(self.request, cluster):
                rest = self._unsuspended(cluster)
                if rest.nodes:
                    self.others.append(rest)
        self.local_alive = self.local is not None and self.local.reachable and bool(self.local.nodes)
        self.picked: dict[str, PrefillNodeFacts | None] = {}
        for cluster in (*self.others, self.local) if self.local is not None and self.local_alive else self.others:
            node = prefill_node(cluster.nodes, self.request, self.stop, values.session_s)
            self.picked[cluster.name] = node
            if node is not None and node.queued_tokens > 0:
                options.queued = True

    def _unsuspended(self, cluster: ClusterFacts) -> ClusterFacts:
        """The cluster without what breakers suspend there, which is remembered."""
        out = [node for node in cluster.nodes if node.suspended or cluster.suspended]
        if not out:
            return cluster
        self.suspended += [(cluster, node) for node in out]
        return msgspec.structs.replace(cluster, nodes=tuple(node for node in cluster.nodes if node not in out))

    @classmethod
    def of(cls, facts: Facts, values: PolicyValues) -> _Case | Decision:
        """The case, or why the request can be served nowhere."""
        request = facts.request
        if not decodes_here(request, facts.clusters):
            return Decision(None, Reason.RESIDENCY, (), facts)
        decode = decode_node(facts.decode_nodes, request, values.decode_slack)
        if decode is None:
            return Decision(None, Reason.OVERLOADED if facts.decode_nodes else Reason.NO_DECODE_NODE, (), facts)
        return cls(facts, values, Options(facts, values, decode))

    def decide(self) -> Decision:
        nothing = self.stop - self.decode.cached_tokens <= 0
        if self.decode.prefills and (nothing or self.request.whole):
            in_place = self.options.in_place()
            why = Reason.NOTHING_TO_PREFILL if nothing else Reason.WHOLE
            return Decision(in_place, why, (in_place,), self.facts)
        here = self._here()
        hint, name = self.request.hint, self.request.hint_cluster
        if hint is RouteHint.CLUSTER and self.local is not None and name == self.local.name:
            hint = RouteHint.LOCAL
        if hint is RouteHint.NONE:
            return self._by_cost(here)
        remotes = self._remotes(bounded=False, home_s=None)
        options = (*here, *remotes, *self._barred())
        if hint is RouteHint.LOCAL:
            return self._locally(_least(here), Reason.HINT, options)
        wanted = [o for o in remotes if hint is RouteHint.REMOTE or o.cluster == name]
        best = _least([o for o in wanted if not self._link(o).congested] or wanted)
        if best is None:
            return Decision(None, Reason.HINTED_CLUSTER_UNAVAILABLE, options, self.facts)
        return Decision(best, Reason.HINT, options, self.facts)

    def fall_back(self) -> Decision:
        here = self.request.whole or self.stop - self.decode.cached_tokens <= 0
        in_place = here and self.decode.prefills
        local = self.options.in_place() if in_place else _least(self._here(moves=False))
        if local is None:
            return Decision(None, self._full_at_home(), (), self.facts)
        return Decision(local, Reason.FALLBACK, (local,), self.facts)

    def _by_cost(self, here: list[Option]) -> Decision:
        below = self._increment() <= self.facts.threshold_tokens
        if self.request.waited_s > 0 and not below:
            here = [self._in_vain(option) for option in here]
        local, home_s = _least(here), None
        for option in here:
            predicted = option.predicted_ttft_s
            if predicted is not None and (home_s is None or predicted < home_s):
                home_s = predicted
        remotes = self._remotes(True, home_s)
        barred = self._barred()
        options = (*here, *remotes, *barred)
        allowed = [o for o in remotes if o.allowed]
        best = _least(allowed)
        if not self.local_alive and not self.decode.prefills:
            best = best or _least(remotes)
            return Decision(best, self._full() if best is None else Reason.NO_WAY_AT_HOME, options, self.facts)
        if below and not (best is not None and local is not None and self._bends(local, best)):
            return self._locally(local, Reason.BELOW_THRESHOLD, options)
        if best is None:
            away = [o for o in barred if self.local is None or o.cluster != self.local.name]
            return self._locally(local, _why_home([*remotes, *away]), options)
        mine = None if local is None else local.cost_s
        if mine is not None and best.cost_s is not None and mine + self.values.slack_s <= best.cost_s:
            return self._locally(local, Reason.REMOTE_DEARER, options)
        if self.values.observe:
            return self._locally(local, Reason.OBSERVED, options, would=best)
        return Decision(best, Reason.HOME_BUSY if below else Reason.ABOVE_THRESHOLD, options, self.facts)

    def _in_vain(self, option: Option) -> Option:
        """A way at home, as one must think of it who has waited for it so far."""
        node = None if option.prefill_node is None or self.local is None else self.picked[self.local.name]
        if node is None or not busy(node) or option.predicted_ttft_s is None:
            return option
        waited, cost = self.request.waited_s, option.cost_s
        return msgspec.structs.replace(
            option,
            predicted_ttft_s=option.predicted_ttft_s + waited,
            cost_s=None if cost is None else cost + waited,
        )

    def _bends(self, local: Option, best: Option) -> bool:
        """Whether a prompt that should stay goes all the same: somebody waits at home, and away costs less."""
        node = None if local.prefill_node is None or self.local is None else self.picked[self.local.name]
        if self.values.threshold_s <= 0 or node is None or node.queued_tokens <= 0:
            return False
        return local.cost_s is not None and best.cost_s is not None and best.cost_s < local.cost_s

    def _locally(
        self, local: Option | None, reason: Reason, options: tuple[Option, ...], would: Option | None = None
    ) -> Decision:
        if local is None:
            return Decision(None, self._full_at_home(), options, self.facts, would)
        if not self.local_alive and reason is not Reason.OBSERVED:
            reason = Reason.NO_LOCAL_PREFILL
        return Decision(local, reason, options, self.facts, would)

    def _full_at_home(self) -> Reason:
        """Why there is no way at home: no room, or nothing that could prefill."""
        return Reason.OVERLOADED if self.local_alive or self.decode.prefills else Reason.NO_PREFILL

    def _full(self) -> Reason:
        """Why there is no way at all."""
        return Reason.OVERLOADED if self.others else self._full_at_home()

    # ---- the threshold

    def _increment(self) -> int:
        """Tokens to compute here: with what is cached here and, in abundance, what can be moved here."""
        cached = self.decode.cached_tokens if self._may_prefill_in_place() else 0
        if self.local is not None and self.local_alive:
            for node in self.local.nodes:
                if node.cached_tokens > cached:
                    cached = node.cached_tokens
            source = self._source_elsewhere(self.picked[self.local.name])
            if source is not None:
                cached = max(cached, source.node.cached_tokens)
        return self.stop - cached

    # ---- ways

    def _here(self, moves: bool = True) -> list[Option]:
        """The ways at home; in place where no local prefill node is alive, none where all of them are full.

        Without ``moves``, none that waits for another cluster.
        """
        if self.local is None or not self.local_alive:
            return [self.options.in_place()] if self.decode.prefills else []
        found = []
        node = self.picked[self.local.name]
        if node is not None:
            found.append(self.options.through(self.local, node))
            source = self._source_elsewhere(node) if moves else None
            if source is not None and source.node.cached_tokens > node.cached_tokens:
                found.append(self.options.through(self.local, node, source))
        if self._may_prefill_in_place():
            found.append(self.options.in_place())
        return found

    def _remotes(self, bounded: bool, home_s: float | None) -> list[Option]:
        found = []
        for cluster in self.others:
            node = self.picked[cluster.name]
            if node is None:
                continue
            found.append(self.options.through(cluster, node, None, bounded, home_s))
            source = self._source_here(cluster, node)
            if source is not None and source.node.cached_tokens > node.cached_tokens:
                found.append(self.options.through(cluster, node, source, bounded, home_s))
        return found

    def _barred(self) -> list[Option]:
        """The ways that breakers are open for, to be shown."""
        found = []
        for cluster, node in self.suspended:
            way = self.options.through(cluster, node)
            found.append(msgspec.structs.replace(way, allowed=False, barred=Bar.BREAKER_OPEN))
        return found

    def _source_elsewhere(self, to: PrefillNodeFacts | None) -> Source | None:
        """From where a prefix could be moved to a node here."""
        if not self.facts.can_move:
            return None
        ways = [(c, c.link) for c in self.others if abundant(c.link, self.values.abundant_below)]
        return longest(ways, to, self.stop)

    def _source_here(self, cluster: ClusterFacts, to: PrefillNodeFacts) -> Source | None:
        """From where at home a prefix could be moved to a node of a cluster."""
        if not self.facts.can_move or self.local is None or cluster.outward is None:
            return None
        if not abundant(cluster.outward, self.values.abundant_below):
            return None
        return longest([(self.local, cluster.outward)], to, self.stop)

    def _may_prefill_in_place(self) -> bool:
        cached = self.decode.cached_tokens
        return self.decode.prefills and cached > 0 and self.stop - cached <= self.values.in_place_tokens

    def _link(self, option: Option) -> LinkFacts:
        return next(c.link for c in self.others if c.name == option.cluster)


def _least(options: Sequence[Option]) -> Option | None:
    """The option of least cost. One whose cost is not known goes first: it is tried; of several the first by name."""
    if len(options) < 2:
        return options[0] if options else None
    return min(options, key=_order)


def _order(option: Option) -> tuple[bool, float, str, str, bool]:
    cost = option.cost_s
    return cost is not None, cost or 0.0, option.cluster or "", option.prefill_node or "", option.move is not None


def _why_home(remotes: Sequence[Option]) -> Reason:
    """Why a long prompt stays, where every remote way is barred or there is none."""
    bars = [option.barred for option in remotes]
    if Bar.SLOWER in bars:
        return Reason.REMOTE_SLOWER
    if Bar.CONGESTED in bars:
        return Reason.LINK_CONGESTED
    return Reason.BREAKER_OPEN if Bar.BREAKER_OPEN in bars else Reason.NO_REMOTE
