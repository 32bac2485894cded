"""The long-term loop: look, judge, propose, convert one node after another, and leave well alone.

A plan starts where the model says that another split would serve ``start_gain`` times as much, the evidence would have
to be off by ``sureness`` standard errors for that to be nothing, the load is high enough to matter, and this held at
two steps in a row. Once begun it is carried on, one node a dwell, down to ``carry_on_gain``: stopping half way because
the rest is worth less than a start would leave capacity lying about.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import ceil

import msgspec

from scheduler.controller.actions import Action, Convert, SetThreshold
from scheduler.controller.assessment import Assessment, assess, capacities, gain, ratio, split_of
from scheduler.controller.capacity import Capacities, Split
from scheduler.controller.forecast import DailyPattern, Expected, SlotRecord
from scheduler.controller.observation import LocalNode, Observation, Stage
from scheduler.controller.proposals import Proposal, Proposals, Verdict
from scheduler.controller.settings import ControllerSettings, Mode
from scheduler.controller.traffic import Outlook, Traffic

LOG_ENTRIES = 1000
CARRIED = "carried on: "
STEPS_IN_A_ROW = 2
LOOK_AHEAD_S = 900.0
"""How far ahead the days before are asked: the next slot of a ``DailyPattern``."""
AHEAD_LOAD = 0.85
"""A move for traffic to come must leave today's at no higher load than this."""

_VERDICTS = {Mode.OBSERVE: Verdict.OBSERVED, Mode.ADVISE: Verdict.OPEN, Mode.AUTO: Verdict.AUTO}


class LogEntry(msgspec.Struct, frozen=True):
    """Something that the controller noticed or did, and why."""

    at: float
    what: str
    reason: str


class Controller:
    """A ``LongTermController``. ``epoch`` hands out fencing epochs, each above all before it, over restarts too.

    ``unix_at_0`` is what to add to ``now`` for Unix time; only a forecast needs it. ``assessment`` is the last look,
    None while too little was seen; ``finished_slot`` a record for whoever keeps the daily pattern over restarts.
    """

    def __init__(
        self,
        settings: ControllerSettings,
        epoch: Callable[[], int],
        pattern: DailyPattern | None = None,
        unix_at_0: float = 0.0,
    ) -> None:
        self.settings = settings
        self.proposals = Proposals()
        self.assessment: Assessment | None = None
        self.finished_slot: SlotRecord | None = None
        self.log: deque[LogEntry] = deque(maxlen=LOG_ENTRIES)
        self._untaken: deque[LogEntry] = deque(maxlen=LOG_ENTRIES)
        self._epoch = epoch
        self._pattern = pattern
        self._unix_at_0 = unix_at_0
        self._traffic = Traffic(settings.window_requests, settings.least_requests)
        self._last_start: float | None = None
        self._resting: dict[str, float] = {}
        self._held = 0
        self._ahead_until = float("-inf")

    def step(self, seen: Observation, now: float) -> tuple[Action, ...]:
        """Look and act. In ``OBSERVE`` and ``ADVISE`` nothing is done that nobody approved."""
        for change in self._traffic.observe(seen, now):
            self._say(now, "change", change)
        self._rest(seen, now)
        if self._pattern is not None:
            self.finished_slot = self._pattern.add(seen.lengths, seen.tokens, seen.ends, now + self._unix_at_0)
        outlook = self._traffic.outlook(self.settings.sureness)
        if outlook is None or not seen.nodes:
            self.assessment = None
            return ()
        fleet = capacities(seen, outlook)
        self.assessment = assess(seen, outlook, fleet, self.settings, now)
        self._end(now)
        self._propose(seen, outlook, fleet, now)
        converts = self._convert(seen, fleet, outlook, now)
        return (*self._threshold(seen, fleet, converts, now), *converts)

    def approve(self, number: int, by: str, now: float) -> Proposal:
        """A person approves an open proposal: the next steps carry it out. Raises NoSuchProposal."""
        proposal = self.proposals.approve(number, by, now)
        self._say(now, "approved", f"proposal {number} by {by}")
        return proposal

    def refuse(self, number: int, by: str, now: float) -> Proposal:
        """A person refuses an open proposal: the same split isn't proposed again for a while. Raises NoSuchProposal."""
        proposal = self.proposals.refuse(number, by, now)
        self._say(now, "refused", f"proposal {number} by {by}")
        return proposal

    def take_log(self) -> tuple[LogEntry, ...]:
        """What was said since the last call, for whoever keeps it."""
        taken = tuple(self._untaken)
        self._untaken.clear()
        return taken

    # ---- proposals

    def _end(self, now: float) -> None:
        """Settle the present proposal where nothing is left of it."""
        current, look = self.proposals.current, self._look
        if current is None:
            return
        if look.prefill_now == current.prefill and sum(look.prefill_serving) + sum(look.decode_serving) == sum(
            look.counts
        ):
            self.proposals.settle(Verdict.DONE, now)
            self._say(now, "done", f"proposal {current.number}: the split is as proposed")
        elif current.verdict in (Verdict.OPEN, Verdict.OBSERVED) and now - current.at > self.settings.proposal_s:
            self.proposals.settle(Verdict.EXPIRED, now)

    def _propose(self, seen: Observation, outlook: Outlook, fleet: Capacities, now: float) -> None:
        """Put a proposal where a change is worth it now, or will be by the days before."""
        current, look = self.proposals.current, self._look
        if current is not None and current.verdict in (Verdict.AUTO, Verdict.APPROVED):
            return
        why = self._worth(look, now)
        self._held = self._held + 1 if why else 0
        if why and self._held >= STEPS_IN_A_ROW:
            self._put(look.prefill_best, look.threshold_then, look.lambda_best, why, now, forecast=False)
        elif not why:
            if current is not None and not current.forecast and look.gain < self.settings.carry_on_gain:
                self.proposals.settle(Verdict.SUPERSEDED, now)
            self._look_ahead(seen, outlook, fleet, now)

    def _worth(self, look: Assessment, now: float) -> str:
        """Why a change is worth it; "" where it is not."""
        s = self.settings
        if look.prefill_best == look.prefill_now or look.gain < s.start_gain or look.gain_surely < 1.0:
            return ""
        if look.load < s.busy_floor or (now < self._ahead_until and look.load < 1.0):
            return ""
        moves = sum(abs(a - b) for a, b in zip(look.prefill_best, look.prefill_now, strict=True))
        lost = look.lambda_now * moves / max(1, sum(look.counts)) * s.conversion_s
        if (look.lambda_best - look.lambda_now) * s.payback_s <= lost:
            return ""
        return (
            f"{look.bottleneck} is full first: {look.lambda_now:.3g} of {look.rate:.3g} req/s offered; with "
            f"{_words(look.kinds, look.prefill_best, look.counts)} it is {look.lambda_best:.3g}, {look.gain:.2f} times "
            f"as much ({look.gain_surely:.2f} if the evidence errs against it)"
        )

    def _look_ahead(self, seen: Observation, outlook: Outlook, fleet: Capacities, now: float) -> None:
        expected = None if self._pattern is None else self._pattern.expect(now + self._unix_at_0 + LOOK_AHEAD_S)
        if expected is None:
            return
        look, s = self._look, self.settings
        then = _expected(outlook, expected)
        fleet_then = capacities(seen, then)
        best = fleet_then.best(then.output_tokens, look.prefill_now)
        better = gain(fleet_then, then, look.prefill_now, best)
        load_then = ratio(then.rate, fleet_then.lambda_max(look.prefill_now, then.output_tokens))
        today = ratio(outlook.rate, fleet.lambda_max(best, outlook.output_tokens))
        if best == look.prefill_now or better < s.start_gain or load_then < s.busy_floor or today > AHEAD_LOAD:
            return
        why = (
            f"{expected.days} days before had {expected.rate:.3g} req/s of {expected.output_tokens:.0f} output tokens "
            f"in {LOOK_AHEAD_S / 60:.0f} minutes from now; {_words(look.kinds, best, look.counts)} will serve "
            f"{better:.2f} times as much of it"
        )
        rate_then = fleet_then.lambda_max(best, then.output_tokens)
        self._put(best, fleet_then.prefill(best)[1], rate_then, why, now, forecast=True, better=better)
        self._ahead_until = now + LOOK_AHEAD_S

    def _put(
        self,
        best: Split,
        threshold: float,
        rate_then: float,
        why: str,
        now: float,
        *,
        forecast: bool,
        better: float | None = None,
    ) -> None:
        current, look, s = self.proposals.current, self._look, self.settings
        worth = look.gain if better is None else better
        if current is not None and current.prefill == best and current.prefill_now == look.prefill_now:
            return
        if self.proposals.refused(best, worth, now - s.refusal_s):
            return
        proposal = Proposal(
            number=self.proposals.take_number(),
            at=now,
            kinds=look.kinds,
            prefill_now=look.prefill_now,
            prefill=best,
            decode=tuple(count - n for count, n in zip(look.counts, best, strict=True)),
            threshold=threshold,
            lambda_now=look.lambda_now,
            lambda_then=rate_then,
            gain=worth,
            gain_surely=look.gain_surely if better is None else better,
            rate=look.rate,
            output_tokens=look.output_tokens,
            requests=look.requests,
            bottleneck=look.bottleneck,
            forecast=forecast,
            reason=why,
            verdict=_VERDICTS[s.mode],
        )
        self.proposals.put(proposal)
        self._say(now, proposal.verdict.value, f"proposal {proposal.number}: {why}")

    # ---- actions

    def _threshold(
        self, seen: Observation, fleet: Capacities, converts: tuple[Convert, ...], now: float
    ) -> tuple[SetThreshold, ...]:
        """Follow the best threshold for the nodes that serve once these leave, in steps that are worth a message."""
        current = self.proposals.current
        approved = current is not None and current.verdict is Verdict.APPROVED
        if self.settings.mode is not Mode.AUTO and not approved:
            return ()
        leaving = {order.node_id for order in converts}
        serving = split_of(
            seen,
            [
                node
                for node in seen.nodes
                if node.stage is Stage.PREFILL and node.becoming is None and node.node_id not in leaving
            ],
        )
        best = fleet.prefill(serving)[1]
        if abs(best - seen.threshold) <= self.settings.threshold_step * best:
            return ()
        reason = (
            f"with {sum(serving)} local prefill nodes serving, prefill at home and in the clusters are full together "
            f"at {best:.0f} uncached tokens"
        )
        self._say(now, "threshold", reason)
        return (SetThreshold(best, reason),)

    def _convert(self, seen: Observation, fleet: Capacities, outlook: Outlook, now: float) -> tuple[Convert, ...]:
        """The next node of a plan under way, if it is time."""
        current, look, s = self.proposals.current, self._look, self.settings
        if current is None or current.verdict not in (Verdict.AUTO, Verdict.APPROVED):
            return ()
        if self._last_start is not None and now - self._last_start < s.dwell_s:
            return ()
        moving = sum(node.becoming is not None for node in seen.nodes)
        if moving >= min(s.most_moving, ceil(len(seen.nodes) / 2)):
            return ()
        fixed = current.verdict is Verdict.APPROVED or current.forecast
        target = current.prefill if fixed else look.prefill_best
        if not current.forecast and gain(fleet, outlook, look.prefill_now, target) < s.carry_on_gain:
            if not moving:
                self.proposals.settle(Verdict.SUPERSEDED, now)
                self._say(now, "stopped", f"proposal {current.number}: what is left of it gains too little")
            return ()
        move = self._next_move(seen, fleet, outlook, target, now)
        if move is None:
            return ()
        node, stage = move
        if target != current.prefill:
            self._put(
                target,
                look.threshold_then,
                look.lambda_best,
                CARRIED + f"{current.reason.removeprefix(CARRIED)}",
                now,
                forecast=False,
            )
            current = self.proposals.current or current
        self._last_start = now
        order = Convert(node.node_id, stage, self._epoch(), current.reason, current.number)
        self._say(now, "convert", f"{order.node_id} to {stage}: {order.reason}")
        return (order,)

    def _next_move(
        self, seen: Observation, fleet: Capacities, outlook: Outlook, target: Split, now: float
    ) -> tuple[LocalNode, Stage] | None:
        """The step towards the target that leaves the most capacity, and the node of it that is free soonest."""
        look = self._look
        best: tuple[float, LocalNode, Stage] | None = None
        decoding = [node for node in seen.nodes if node.stage is Stage.DECODE and node.becoming is None]
        for i, kind in enumerate(look.kinds):
            difference = target[i] - look.prefill_now[i]
            if difference == 0:
                continue
            stage = Stage.PREFILL if difference > 0 else Stage.DECODE
            if stage is Stage.PREFILL and len(decoding) < 2:
                continue
            free = [
                node
                for node in seen.nodes
                if node.kind == kind
                and node.stage is not stage
                and node.becoming is None
                and node.convertible
                and self._resting.get(node.node_id, now) <= now
            ]
            if not free:
                continue
            after = tuple(n + (1 if difference > 0 else -1) * (j == i) for j, n in enumerate(look.prefill_now))
            left = fleet.lambda_max(after, outlook.output_tokens)
            if best is None or left > best[0]:
                best = (left, min(free, key=lambda node: (node.work, node.node_id)), stage)
        return None if best is None else best[1:]

    def _rest(self, seen: Observation, now: float) -> None:
        """Nodes whose conversion failed are left alone for a while; those gone are forgotten."""
        here = {node.node_id for node in seen.nodes}
        self._resting = {name: until for name, until in self._resting.items() if until > now and name in here}
        for name in seen.failed:
            self._resting[name] = now + self.settings.after_failure_s
            self._say(now, "failed", f"the conversion of {name} was rolled back; it is left alone for a while")

    def _say(self, now: float, what: str, reason: str) -> None:
        entry = LogEntry(now, what, reason)
        self.log.append(entry)
        self._untaken.append(entry)

    @property
    def _look(self) -> Assessment:
        assert self.assessment is not None
        return self.assessment


def _expected(outlook: Outlook, expected: Expected) -> Outlook:
    return Outlook(
        expected.lengths,
        0.0,
        expected.output_tokens,
        expected.output_tokens,
        expected.output_tokens,
        expected.rate,
        outlook.requests,
        outlook.completions,
    )


def _words(kinds: tuple[str, ...], prefill: Split, counts: Split) -> str:
    """A split for people: 3 prefill and 5 decode nodes, by kind where there are several."""
    parts = [
        f"{n} prefill and {count - n} decode" + (f" of {kind}" if len(kinds) > 1 else "")
        for kind, n, count in zip(kinds, prefill, counts, strict=True)
    ]
    return ", ".join(parts) + " nodes"
