"""The way from one cluster to the local nodes, as a whole: fed by what happens and what nodes report, asked for facts.

Many nodes share it. What one of them delivers is a part of what the link does, so figures of the same moment are added
up. Nodes may say anything: what no link does is passed over, and what is kept of them is bounded. Time is handed in.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from math import isfinite

from scheduler.congestion import Congestion, Signs
from scheduler.facts import LinkFacts
from scheduler.link_rate import MAX_BYTES_PER_S, LinkRate
from scheduler.probing import ProbeBudget
from scheduler.speeds import Ewma

FRESH_S = 20.0
"""An idle link that decisions ask about is measured ten times as often, where its nodes can."""
PRESENT_S = 2.0
"""For so long what a node reported counts as of now: two heartbeats."""
STALLED_S = 2.0
DEAD_S = 5.0
"""How long a link on which nothing moved is dead without further word."""
MAX_SENDERS = 1024
MAX_PATHS = 256
"""Peers of one sender that are listened to."""
MAX_RTT_S = 60.0
FASTER = 1.05
"""A probe that raises the estimate by more is followed by another."""
LEAST_LOSS_BYTES = 256 << 10
"""Loss is told where so much was sent within the last few seconds."""
_LOSS_HALVES_S = 1.0


@dataclass(frozen=True, slots=True)
class PathReport:
    """One node's connections to one other, as their sender sees them. Counts since they began; 0 is not measured.

    Of late the path did ``at_least`` bytes per second and, where it was the limit, no more than ``at_most``. For
    ``stalled_s`` nothing has arrived though much waited.
    """

    rtt_s: float
    least_rtt_s: float = 0.0
    acked_bytes: int = 0
    resent_bytes: int = 0
    probe_bytes: int = 0
    at_least: float = 0.0
    at_most: float = 0.0
    stalled_s: float = 0.0


@dataclass(frozen=True, slots=True)
class _Sender:
    """What one node said last of its paths over this link; rates are those of all of them together.

    ``carried`` is what they have delivered between the last two reports, ``at_most`` is 0 where none was the limit.
    """

    at: float
    paths: dict[str, PathReport]
    carried: float
    at_least: float
    at_most: float
    stalled_s: float

    @classmethod
    def of(cls, paths: dict[str, PathReport], carried: dict[str, float], now: float) -> _Sender:
        """Add up what is known of each path; ``carried`` lacks those that were not heard of before."""
        limits = {name: limit for name, report in paths.items() if (limit := _figure(report.at_most))}
        return cls(
            now,
            paths,
            sum(carried.values()),
            max((_figure(report.at_least) for report in paths.values()), default=0.0),
            sum(limits.get(name, carried.get(name, 0.0)) for name in paths) if limits else 0.0,
            max((_figure(report.stalled_s) for report in paths.values()), default=0.0),
        )


class LinkState:
    """One link. The answers follow from the events and the time alone."""

    def __init__(self) -> None:
        self._rate = LinkRate()
        self._probing = ProbeBudget()
        self._congestion = Congestion()
        self._rtt = Ewma()
        self._least_rtt: float | None = None
        self._senders: OrderedDict[str, _Sender] = OrderedDict()
        self._carried = 0.0
        self._reported_at = float("-inf")
        self._asked: list[int] = []
        self._asked_bytes = 0
        self._delivered = 0
        self._crowded = False
        self._sent_lately = 0.0
        self._resent_lately = 0.0
        self._dead_until = float("-inf")
        self._shown = 0.0
        self._probed_rate: float | None = None
        self.probe_bytes = 0
        """What probes have taken so far."""

    # ---- what happens

    def started(self, wire_bytes: int) -> None:
        """A transfer was asked for that is expected to take so many bytes."""
        self._asked.append(wire_bytes)
        self._asked_bytes += wire_bytes
        self._crowded = self._crowded or len(self._asked) > 1

    def ended(self, wire_bytes: int) -> None:
        """That transfer is over, well or not."""
        if wire_bytes in self._asked:
            self._asked.remove(wire_bytes)
            self._asked_bytes -= wire_bytes
            self._delivered = max(0, self._delivered - wire_bytes)
        if not self._asked:
            self._crowded, self._delivered = False, 0

    def observe(self, wire_bytes: int, transfer_s: float, exposed_s: float, now: float, codec_s: float = 0.0) -> None:
        """A transfer has arrived that is not yet said to have ended; a codec needs ``codec_s`` for it at least."""
        least = self._least_rtt or 0.0
        self._rate.committed(wire_bytes, transfer_s, exposed_s, least, codec_s, not self._crowded, now)
        self._probing.carried(now)
        self._judge(now)

    def observe_rtt(self, rtt_s: float) -> None:
        """A round trip as the receiving end measured it; what cannot be one teaches nothing."""
        self._round_trip(rtt_s, 0.0)

    def reported(self, sender: str, paths: Mapping[str, PathReport], now: float) -> None:
        """A node has told of all its ways over this link, by the peer that each leads to."""
        share = 0.5 ** (max(0.0, now - self._reported_at) / _LOSS_HALVES_S)
        self._sent_lately, self._resent_lately = share * self._sent_lately, share * self._resent_lately
        before, carried = self._senders.pop(sender, None), dict[str, float]()
        kept = dict(islice(paths.items(), MAX_PATHS))
        for peer, report in kept.items():
            self._round_trip(report.rtt_s, report.least_rtt_s)
            if before is not None and peer in before.paths and now > before.at:
                carried[peer] = self._count(before.paths[peer], report, now - before.at, now)
        self._senders[sender] = _Sender.of(kept, carried, now)
        if len(self._senders) > MAX_SENDERS:
            self._senders.popitem(last=False)
        present = [each for each in self._senders.values() if now - each.at <= PRESENT_S]
        self._carried, self._reported_at = sum(each.carried for each in present), now
        at_least = max(self._carried, *(each.at_least for each in present))
        self._shown = max((each.at_least for each in present if each.at_least), default=self._shown)
        at_most = 0.0
        if any(each.at_most for each in present):
            at_most = sum(each.at_most or each.carried for each in present)
        self._rate.between(at_least, at_most, now)
        if self._carried:
            self._dead_until = float("-inf")
        elif any(each.stalled_s >= STALLED_S for each in present):
            self._dead_until = now + DEAD_S
        self._judge(now)

    def wanted(self, now: float) -> None:
        """A decision asks about this link: from now on it is worth probing for a while."""
        self._probing.wanted(now)

    def probe_due(self, now: float) -> int:
        """Bytes of the probe that should be sent now, 0 where none should. ``probed`` says that it was."""
        rate = self._rate.value
        self._probing.save(rate if rate is None or not self._shown else min(rate, self._shown), now)
        faster = self._probed_rate is not None and rate is not None and rate > FASTER * self._probed_rate
        return 0 if self._asked else self._probing.due(now, faster)

    def probed(self, nbytes: int, now: float) -> None:
        """A probe of so many bytes was asked for."""
        self._probing.spend(nbytes, now)
        self._probed_rate = self._rate.value
        self.probe_bytes += nbytes

    # ---- what is known

    @property
    def bytes_per_s(self) -> float | None:
        """The learnt rate, however old."""
        return self._rate.value

    @property
    def queued_bytes(self) -> int:
        """What was asked for and has not been seen to arrive."""
        return max(0, self._asked_bytes - self._delivered)

    @property
    def queueing_s(self) -> float | None:
        """What the round trip has above its least; None where it was not measured."""
        if self._rtt.value is None or self._least_rtt is None:
            return None
        return max(0.0, self._rtt.value - self._least_rtt)

    @property
    def loss(self) -> float | None:
        """The share of bytes of late that had to be sent again; None where too little was sent to say."""
        if self._sent_lately < LEAST_LOSS_BYTES:
            return None
        return min(1.0, self._resent_lately / self._sent_lately)

    def dead(self, now: float) -> bool:
        """Whether nothing moves on it though something waits."""
        return now < self._dead_until

    def utilisation(self, now: float) -> float | None:
        """The share of its rate that is in use; None where either is unmeasured."""
        if now - self._reported_at > PRESENT_S or not self._rate.value:
            return None
        return min(1.0, self._carried / self._rate.value)

    def facts(self, now: float) -> LinkFacts:
        """What a decision may know of this link. One on which nothing moves has the rate 0."""
        return LinkFacts(
            bytes_per_s=0.0 if self.dead(now) else self._rate.value,
            rtt_s=self._rtt.value,
            queued_bytes=self.queued_bytes,
            fresh=now - self._rate.confirmed_at <= FRESH_S,
            loss=self.loss,
            congested=self._congestion.congested,
            utilisation=self.utilisation(now),
        )

    # ---- inside

    def _round_trip(self, told_s: float, least_s: float) -> None:
        rtt, least = _figure(told_s, MAX_RTT_S), _figure(least_s, MAX_RTT_S)
        if rtt:
            self._rtt.add(rtt)
        if least:
            self._least_rtt = least
        elif rtt:
            self._least_rtt = min(rtt, self._least_rtt or rtt)

    def _count(self, before: PathReport, report: PathReport, took: float, now: float) -> float:
        """What a path has carried since its last report, in bytes per second; counts that went back began anew."""
        acked = report.acked_bytes - before.acked_bytes
        if not 0 <= acked <= MAX_BYTES_PER_S * took:
            return 0.0
        data = acked - min(acked, max(0, report.probe_bytes - before.probe_bytes))
        if self._asked and data:
            self._delivered += data
            self._probing.carried(now)
        resent = min(acked, max(0, report.resent_bytes - before.resent_bytes))
        self._sent_lately += acked
        self._resent_lately += resent
        return acked / took

    def _judge(self, now: float) -> None:
        """Look for signs of congestion; where no path is there, nothing is known of it any more."""
        if not any(sender.paths for sender in self._senders.values() if now - sender.at <= PRESENT_S):
            self._congestion.update(Signs(), now)
            return
        signs = Signs(
            rate=self._rate.value,
            best=self._rate.best(now),
            loss=self.loss,
            queue_s=self.queueing_s,
            least_rtt_s=self._least_rtt,
            utilisation=self.utilisation(now),
        )
        self._congestion.update(signs, now)


def _figure(value: float, most: float = MAX_BYTES_PER_S) -> float:
    """A figure that a node told, 0 where it cannot be one."""
    return value if isfinite(value) and 0 < value <= most else 0.0
