"""A link as a whole: many senders, transfers under way, probes while nothing is, and nodes that say anything."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isfinite, nan

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scheduler.links import DEAD_S, FRESH_S, MAX_PATHS, MAX_SENDERS, PRESENT_S, LinkState, PathReport
from tests.calm import calm

NOW = 100.0
GBPS = 125e6
MBPS_50 = 6.25e6
QUIET = PathReport(rtt_s=0.03, least_rtt_s=0.03)


class Sending:
    """A node that reports once a second, of one path, what it has sent at some rate."""

    def __init__(self, link: LinkState, name: str = "p1", now: float = NOW) -> None:
        self.link, self.name, self.now, self.report = link, name, now, QUIET
        self.tell()

    def tell(self, rate: float = 0.0, *, limited: bool = False, seconds: float = 1.0, **more: float) -> None:
        self.now += seconds
        acked = self.report.acked_bytes + int(rate * seconds)
        figures = {"at_least": rate, "at_most": rate if limited else 0.0, "stalled_s": 0.0} | more
        self.report = replace(self.report, acked_bytes=acked, **figures)  # type: ignore[arg-type]
        self.link.reported(self.name, {"d1": self.report}, self.now)


def seen(rate: float = GBPS) -> LinkState:
    """A link of which a committed transfer has shown this rate."""
    link = LinkState()
    link.observe(int(rate), 1.0, 1.0, NOW)
    return link


def test_nothing_is_known_of_a_new_link() -> None:
    facts = LinkState().facts(NOW)
    assert (facts.bytes_per_s, facts.rtt_s, facts.loss, facts.utilisation) == (None, None, None, None)
    assert (facts.queued_bytes, facts.fresh, facts.congested) == (0, False, False)


def test_a_cut_is_seen_while_the_first_transfer_over_it_is_still_under_way() -> None:
    link = seen()
    node = Sending(link)
    link.started(50_000_000)
    node.tell(MBPS_50, limited=True)
    node.tell(MBPS_50, limited=True)
    facts = link.facts(node.now)
    assert facts.bytes_per_s == pytest.approx(MBPS_50, rel=0.5)
    node.tell(MBPS_50, limited=True)
    assert link.facts(node.now).congested


def test_a_link_without_any_path_is_not_congested_for_long_and_not_fresh_for_long() -> None:
    link = seen()
    node = Sending(link)
    for _ in range(4):
        node.tell(MBPS_50, limited=True)
    assert link.facts(node.now).congested
    for _ in range(4):
        node.now += 1.0
        link.reported("p1", {}, node.now)
    assert not link.facts(node.now).congested
    assert not link.facts(node.now + FRESH_S).fresh


def test_a_sender_that_is_not_held_up_does_not_lower_the_rate_and_raises_it_where_it_is_faster() -> None:
    link = seen(1e6)
    node = Sending(link)
    node.tell(1e3)
    assert link.bytes_per_s == 1e6
    node.tell(5e6)
    assert (link.bytes_per_s or 0) > 3e6


def test_what_several_senders_do_at_once_is_added_up() -> None:
    link = seen()
    nodes = [Sending(link, name) for name in ("p1", "p2", "p3")]
    for _ in range(10):
        for node in nodes:
            node.tell(20e6, limited=True)
    assert link.bytes_per_s == pytest.approx(60e6, rel=0.05)
    assert link.facts(nodes[0].now).utilisation == pytest.approx(1.0, rel=0.05)


def test_a_sender_that_falls_silent_no_longer_counts() -> None:
    link = seen()
    one, other = Sending(link, "p1"), Sending(link, "p2")
    for node in (one, other):
        node.tell(20e6)
    one.tell(20e6, seconds=PRESENT_S + 0.1)
    assert link.facts(one.now).utilisation == pytest.approx(20e6 / GBPS, rel=0.01)
    assert link.facts(one.now + PRESENT_S + 0.1).utilisation is None


def test_what_has_arrived_of_a_transfer_is_no_longer_queued() -> None:
    link = seen()
    node = Sending(link)
    link.started(40_000_000)
    link.started(10_000_000)
    node.tell(10e6)
    assert link.facts(node.now).queued_bytes == 40_000_000
    link.ended(10_000_000)
    assert link.facts(node.now).queued_bytes == 40_000_000
    node.tell(100e6)
    assert link.facts(node.now).queued_bytes == 0
    link.ended(40_000_000)
    link.started(1000)
    assert link.facts(node.now).queued_bytes == 1000


def test_bytes_of_probes_are_no_transfers_bytes() -> None:
    link = seen()
    node = Sending(link)
    link.started(10_000_000)
    node.tell(1e6, probe_bytes=1_000_000)
    assert link.facts(node.now).queued_bytes == 10_000_000


@calm
@given(st.lists(st.integers(0, 10**9), max_size=20))
def test_queued_bytes_return_to_zero_when_every_transfer_has_ended(sizes: list[int]) -> None:
    link = LinkState()
    for nbytes in sizes:
        link.started(nbytes)
    assert link.facts(NOW).queued_bytes == sum(sizes)
    for nbytes in reversed(sizes):
        link.ended(nbytes)
    link.ended(7)
    assert link.facts(NOW).queued_bytes == 0


def test_a_transfer_beside_another_does_not_lower_the_rate_and_one_alone_does() -> None:
    link = seen(1e6)
    link.started(1000)
    link.started(1000)
    link.ended(1000)
    link.observe(1_000_000, 100.0, 100.0, NOW)
    link.ended(1000)
    assert link.bytes_per_s == 1e6
    link.started(1000)
    link.observe(1_000_000, 100.0, 100.0, NOW)
    assert (link.bytes_per_s or 0) < 1e6


def test_a_link_on_which_nothing_moves_is_dead_until_something_does_or_nothing_more_is_said_of_it() -> None:
    link = seen()
    node = Sending(link)
    node.tell(1e6)
    for _ in range(2):
        node.tell(0.0, stalled_s=1.0)
        assert link.facts(node.now).bytes_per_s == GBPS
    node.tell(0.0, stalled_s=2.0)
    assert link.facts(node.now).bytes_per_s == 0.0
    assert link.dead(node.now)
    assert not link.dead(node.now + DEAD_S)
    node.tell(1e6)
    assert link.facts(node.now).bytes_per_s == GBPS


def test_a_link_over_which_one_peer_is_silent_and_another_answers_is_not_dead() -> None:
    link = seen()
    one, other = Sending(link, "p1"), Sending(link, "p2")
    for _ in range(3):
        one.tell(0.0, stalled_s=9.0)
        other.tell(20.0)
    assert not link.dead(one.now)


def test_loss_is_the_share_that_was_sent_again_of_late() -> None:
    link = seen()
    node = Sending(link)
    node.tell(1e5, resent_bytes=50_000)
    assert link.facts(node.now).loss is None, "too little was sent"
    resent = 0
    for _ in range(30):
        resent += 30_000
        node.tell(1e6, resent_bytes=resent)
    assert link.facts(node.now).loss == pytest.approx(0.03, rel=0.05)
    for _ in range(60):
        node.tell(1e6, resent_bytes=resent)
    assert (link.facts(node.now).loss or 0) < 1e-3


def test_the_queue_on_the_way_is_what_the_round_trip_has_above_its_least() -> None:
    link = LinkState()
    assert link.queueing_s is None
    for _ in range(30):
        link.reported("p", {"d": PathReport(rtt_s=0.13, least_rtt_s=0.03)}, NOW)
    assert link.queueing_s == pytest.approx(0.1, rel=0.01)
    link.observe_rtt(0.01)
    assert (link.queueing_s or 0) > 0.08


def test_what_was_learnt_of_a_link_is_kept_but_not_called_fresh_for_long() -> None:
    link = seen(100.0)
    assert link.facts(NOW + FRESH_S).fresh
    later = link.facts(NOW + FRESH_S + 0.1)
    assert (later.fresh, later.bytes_per_s) == (False, 100.0)


def test_a_recovery_is_seen_by_probes_within_5_s_though_nothing_else_crosses() -> None:
    """Once a second a heartbeat; a probe of n bytes is answered at what the path does, up to what so few bytes show."""
    link = seen(MBPS_50)
    node, probes, spent = Sending(link), [], 0
    for second in range(60):
        link.wanted(node.now)
        nbytes = link.probe_due(node.now)
        if nbytes:
            link.probed(nbytes, node.now)
            spent += nbytes
        truth = MBPS_50 if second < 30 else GBPS
        shown = min(truth, nbytes / 0.005)
        if second >= 30 and (link.bytes_per_s or 0) > GBPS / 2:
            probes.append(second - 30)
        node.tell(nbytes, probe_bytes=spent, at_least=shown, at_most=truth if second < 30 and nbytes else 0.0)
        if second == 29:
            assert link.bytes_per_s == pytest.approx(MBPS_50, rel=0.05)
            assert spent <= 0.02 * MBPS_50 * 30
    assert probes[0] <= 5
    assert link.probe_bytes == spent


def test_transfers_go_before_probes() -> None:
    link = seen()
    link.probe_due(NOW)
    link.wanted(NOW + 5.0)
    assert link.probe_due(NOW + 5.0)
    link.started(1)
    assert not link.probe_due(NOW + 5.0)
    link.ended(1)
    assert link.probe_due(NOW + 5.0)


def test_what_is_kept_of_senders_and_their_peers_is_bounded() -> None:
    link = LinkState()
    for n in range(MAX_SENDERS + 10):
        link.reported(f"p{n}", {f"d{m}": QUIET for m in range(MAX_PATHS + 10 if n == MAX_SENDERS else 1)}, NOW)
    assert len(link._senders) == MAX_SENDERS
    assert max(len(sender.paths) for sender in link._senders.values()) == MAX_PATHS


figures = st.one_of(st.sampled_from([0.0, -1.0, nan, inf, -inf, 1e30, 1e-30]), st.floats(), st.floats(0, 1e10))
counts = st.one_of(st.integers(-(10**30), 10**30), st.integers(0, 10**10))
reports = st.builds(PathReport, figures, figures, counts, counts, counts, figures, figures, figures)


@calm
@given(
    st.lists(
        st.tuples(st.sampled_from(["p1", "p2"]), st.dictionaries(st.sampled_from("ab"), reports), st.floats(0, 5))
    ),
    st.booleans(),
)
def test_whatever_nodes_say_the_facts_can_be_so(
    told: list[tuple[str, dict[str, PathReport], float]], known: bool
) -> None:
    link, now = seen(1e6) if known else LinkState(), NOW
    link.started(1000)
    for sender, paths, took in told:
        now += took
        link.reported(sender, paths, now)
        facts = link.facts(now)
        assert facts.bytes_per_s is None or 0 <= facts.bytes_per_s <= 1e13
        assert facts.rtt_s is None or 0 < facts.rtt_s <= 60
        assert 0 <= facts.queued_bytes <= 1000
        for share in (facts.loss, facts.utilisation):
            assert share is None or 0 <= share <= 1
        assert link.queueing_s is None or (isfinite(link.queueing_s) and link.queueing_s >= 0)
        assert link.probe_due(now) >= 0


@calm
@given(st.lists(st.tuples(st.sampled_from(["p1", "p2"]), st.dictionaries(st.sampled_from("ab"), reports))))
def test_equal_events_give_equal_facts(told: list[tuple[str, dict[str, PathReport]]]) -> None:
    links = [seen(), seen()]
    for link in links:
        for n, (sender, paths) in enumerate(told):
            link.reported(sender, paths, NOW + n)
    assert links[0].facts(NOW) == links[1].facts(NOW)
