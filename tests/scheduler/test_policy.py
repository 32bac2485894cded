"""Routing decisions: the threshold, hints, what is reachable, and that a decision depends on facts alone."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from kvcache.quality import Quality
from scheduler.decision import Bar, Decision, Move, Reason
from scheduler.facts import (
    ClusterFacts,
    CodecFacts,
    DecodeNodeFacts,
    Facts,
    LinkFacts,
    PrefillCurve,
    PrefillNodeFacts,
    Prices,
    RequestFacts,
    RouteHint,
    SizeFacts,
)
from scheduler.policy import RoutingPolicy
from scheduler.values import PolicyValues

LINK = LinkFacts(bytes_per_s=1e6, rtt_s=0.01)


def lossless(ratio: float | None) -> CodecFacts:
    return CodecFacts("lossless", Quality.EXACT, ratio, 1e9, None)


def node(
    name: str,
    queued: int = 0,
    slots: int = 4,
    speed: float | None = 1000.0,
    cached: int = 0,
    ratio: float | None = 0.5,
) -> PrefillNodeFacts:
    curve = None if speed is None else PrefillCurve.at_rate(speed)
    return PrefillNodeFacts(name, queued, slots, curve, cached, cached, (lossless(ratio),))


def cluster(name: str, *nodes: PrefillNodeFacts, local: bool = False, link: LinkFacts = LINK) -> ClusterFacts:
    return ClusterFacts(name, local, bool(nodes), nodes, link)


def facts(
    tokens: int = 2000,
    local: tuple[PrefillNodeFacts, ...] = (node("p-local", speed=100.0),),
    remote: tuple[PrefillNodeFacts, ...] = (node("p-east"),),
    decode: tuple[DecodeNodeFacts, ...] = (DecodeNodeFacts("d", 0, 4, None),),
    threshold: int = 1000,
    **request: object,
) -> Facts:
    asked = RequestFacts("r", tokens, SizeFacts(state=1_000_000), **request)  # type: ignore[arg-type]
    return Facts(asked, (cluster("local", *local, local=True), cluster("east", *remote)), decode, threshold)


def decide(given_facts: Facts) -> Decision:
    return RoutingPolicy().decide(given_facts)


def test_an_increment_at_the_threshold_stays_and_one_token_more_leaves() -> None:
    at = decide(facts(tokens=1001))
    above = decide(facts(tokens=1002))
    assert (at.reason, at.remote) == (Reason.BELOW_THRESHOLD, False)
    assert (above.reason, above.remote) == (Reason.ABOVE_THRESHOLD, True)


def test_what_a_local_prefill_node_has_cached_does_not_count_towards_the_threshold() -> None:
    decision = decide(facts(tokens=2000, local=(node("p-local", cached=1500, speed=None),)))
    assert decision.reason is Reason.BELOW_THRESHOLD
    assert decision.chosen is not None
    assert decision.chosen.compute_increment == 499


def test_the_codec_is_lossless_between_clusters_and_raw_inside_one_and_an_operator_may_change_it() -> None:
    by_cluster = {option.cluster: option.codec for option in decide(facts()).options}
    assert by_cluster == {"local": "raw", "east": "lossless"}
    changed = RoutingPolicy(PolicyValues(remote_codec="raw")).decide(facts())
    assert {option.codec for option in changed.options} == {"raw"}


def test_an_inexact_default_is_refused_because_every_request_would_meet_it() -> None:
    with pytest.raises(ValueError, match="remote_codec: 'int8' is no exact codec"):
        PolicyValues(remote_codec="int8")


def test_a_request_that_allows_it_gets_the_codec_that_the_link_asks_for_and_the_record_shows_the_others() -> None:
    int8 = CodecFacts("int8", Quality.NEAR, 0.25, 1e8, 1e8)
    [_, east] = facts().clusters
    [prefill] = east.nodes
    slow = replace(east, nodes=(replace(prefill, codecs=(*prefill.codecs, int8)),), link=LinkFacts(1e5, 0.01))
    base = facts(decode=(DecodeNodeFacts("d", 0, 4, None, codecs=(int8,)),), quality=Quality.NEAR)
    near = decide(replace(base, clusters=(base.clusters[0], slow))).chosen
    assert near is not None
    assert (near.codec, near.quality, near.wire_bytes) == ("int8", Quality.NEAR, 250_000)
    assert near.predicted_ttft_s == pytest.approx(2.5 + 0.01)
    assert {option.name: option.predicted_ttft_s for option in near.codecs} == {
        "int8": pytest.approx(2.51),
        "lossless": pytest.approx(5.01),
    }
    asked = replace(base.request, quality=Quality.EXACT)
    exact = decide(replace(base, request=asked, clusters=(base.clusters[0], slow))).chosen
    assert exact is not None
    assert (exact.codec, exact.quality, exact.predicted_ttft_s) == ("lossless", Quality.EXACT, pytest.approx(5.01))
    assert {option.name: option.allowed for option in exact.codecs} == {"int8": False, "lossless": True}


@pytest.mark.parametrize("tokens", [0, 1])
def test_a_prompt_without_anything_to_prefill_stays_on_the_decode_node(tokens: int) -> None:
    decision = decide(facts(tokens=tokens, threshold=0))
    assert decision.reason is Reason.NOTHING_TO_PREFILL
    assert decision.chosen is not None
    assert decision.chosen.cluster is None
    assert decision.chosen.transfer_bytes == 0


def test_without_a_living_local_prefill_node_the_decode_node_prefills_in_place() -> None:
    for tokens, remote in ((500, (node("p-east"),)), (2000, ())):
        decision = decide(facts(tokens=tokens, local=(), remote=remote))
        assert decision.reason is Reason.NO_LOCAL_PREFILL
        assert decision.chosen is not None
        assert decision.chosen.prefill_node is None
        assert not decision.remote


def test_a_local_prefill_node_that_is_full_refuses_rather_than_loading_the_decode_node() -> None:
    assert decide(facts(tokens=500, local=(node("p-local", slots=0),))).reason is Reason.OVERLOADED


def test_a_long_prompt_stays_when_no_remote_cluster_has_room() -> None:
    for remote in ((), (node("p-east", slots=0),)):
        decision = decide(facts(remote=remote))
        assert decision.reason is Reason.NO_REMOTE
        assert decision.chosen is not None
        assert decision.chosen.cluster == "local"


def test_a_remote_way_that_is_predicted_slower_is_not_allowed() -> None:
    slow = LinkFacts(bytes_per_s=1000.0, rtt_s=0.01)
    base = facts()
    given_facts = replace(base, clusters=(base.clusters[0], cluster("east", node("p-east"), link=slow)))
    decision = decide(given_facts)
    assert decision.reason is Reason.REMOTE_SLOWER
    assert {option.cluster: option.allowed for option in decision.options} == {"local": True, "east": False}


def test_an_old_measurement_does_not_close_a_way_for_ever() -> None:
    slow = LinkFacts(bytes_per_s=1000.0, rtt_s=0.01, fresh=False)
    base = facts()
    decision = decide(replace(base, clusters=(base.clusters[0], cluster("east", node("p-east"), link=slow))))
    assert decision.reason is Reason.ABOVE_THRESHOLD


@pytest.mark.parametrize(
    ("seconds", "slack_s", "reason"),
    [
        (19.9, 0.0, Reason.ABOVE_THRESHOLD),
        (20.1, 0.0, Reason.REMOTE_SLOWER),
        (20.9, 1.0, Reason.ABOVE_THRESHOLD),
        (21.1, 1.0, Reason.REMOTE_SLOWER),
    ],
)
def test_a_remote_way_may_be_slower_by_the_slack_that_an_operator_gives_and_by_no_more(
    seconds: float, slack_s: float, reason: Reason
) -> None:
    """The local way is predicted to take 19.99 s."""
    link = LinkFacts(bytes_per_s=1_000_000 / seconds, rtt_s=None)
    base = facts()
    given_facts = replace(base, clusters=(base.clusters[0], cluster("east", node("p-east", ratio=1.0), link=link)))
    values = PolicyValues(slack_s=slack_s, waiting_weight_per_s=0.0)
    assert RoutingPolicy(values).decide(given_facts).reason is reason


@pytest.mark.parametrize("unmeasured", ["local speed", "remote speed", "rate", "ratio", "local rate"])
def test_remote_is_never_called_slower_by_a_guess(unmeasured: str) -> None:
    slow = LinkFacts(bytes_per_s=1.0, rtt_s=None)
    local = cluster("local", node("p-local", speed=None if unmeasured == "local speed" else 100.0), local=True)
    ratio = None if unmeasured == "ratio" else 1.0
    east = cluster(
        "east", node("p-east", speed=None if unmeasured == "remote speed" else 100.0, ratio=ratio), link=slow
    )
    if unmeasured == "rate":
        east = replace(east, link=replace(slow, bytes_per_s=None))
    if unmeasured == "local rate":
        local = replace(local, link=LinkFacts(None, None))
    decision = decide(replace(facts(), clusters=(local, east)))
    assert decision.reason is Reason.ABOVE_THRESHOLD


def test_hints_choose_the_way_against_the_threshold() -> None:
    assert decide(facts(tokens=10, hint=RouteHint.REMOTE)).remote
    assert not decide(facts(hint=RouteHint.LOCAL)).remote
    named = decide(facts(tokens=10, hint=RouteHint.CLUSTER, hint_cluster="east"))
    assert (named.remote, named.reason) == (True, Reason.HINT)
    home = decide(facts(hint=RouteHint.CLUSTER, hint_cluster="local"))
    assert (home.remote, home.reason) == (False, Reason.HINT)


def test_a_hint_at_a_cluster_that_cannot_serve_is_refused_and_not_rerouted() -> None:
    for request in (
        {"hint": RouteHint.CLUSTER, "hint_cluster": "west"},
        {"hint": RouteHint.CLUSTER, "hint_cluster": "east", "allowed_clusters": frozenset({"west"})},
        {"hint": RouteHint.REMOTE, "allowed_clusters": frozenset[str]()},
    ):
        decision = decide(facts(**request))  # type: ignore[arg-type]
        assert (decision.chosen, decision.reason) == (None, Reason.HINTED_CLUSTER_UNAVAILABLE)


def test_a_cluster_that_is_not_permitted_is_not_even_an_option() -> None:
    decision = decide(facts(allowed_clusters=frozenset({"west"})))
    assert decision.reason is Reason.NO_REMOTE
    assert [option.cluster for option in decision.options] == ["local"]


def test_an_unreachable_cluster_is_not_used() -> None:
    base = facts()
    drained = replace(base.clusters[1], reachable=False)
    assert decide(replace(base, clusters=(base.clusters[0], drained))).reason is Reason.NO_REMOTE


def test_without_decode_nodes_or_with_full_ones_there_is_no_decision() -> None:
    assert decide(facts(decode=())).reason is Reason.NO_DECODE_NODE
    assert decide(facts(decode=(DecodeNodeFacts("d", 4, 0, None),))).reason is Reason.OVERLOADED


def test_the_prefill_node_with_the_shortest_predicted_wait_is_chosen_not_the_shortest_queue() -> None:
    quick_but_busy = node("a", queued=3000, speed=10_000.0)
    idle_but_slow = node("b", queued=0, speed=1000.0)
    decision = decide(facts(remote=(idle_but_slow, quick_but_busy)))
    assert decision.chosen is not None
    assert decision.chosen.prefill_node == "a"


def test_among_equal_queues_the_unmeasured_node_is_tried() -> None:
    decision = decide(facts(remote=(node("a", speed=5000.0), node("b", speed=None))))
    assert decision.chosen is not None
    assert decision.chosen.prefill_node == "b"


def test_the_decode_node_with_fewest_generations_is_chosen() -> None:
    decision = decide(facts(decode=(DecodeNodeFacts("a", 2, 2, None), DecodeNodeFacts("b", 1, 3, None))))
    assert decision.chosen is not None
    assert decision.chosen.decode_node == "b"


def test_a_fallback_is_local_even_for_a_remote_hint_and_in_place_where_no_prefill_node_lives() -> None:
    policy = RoutingPolicy()
    home = policy.fall_back(facts(hint=RouteHint.REMOTE))
    assert home.reason is Reason.FALLBACK
    assert home.chosen is not None
    assert home.chosen.cluster == "local"
    in_place = policy.fall_back(facts(local=()))
    assert in_place.chosen is not None
    assert in_place.chosen.cluster is None
    assert policy.fall_back(facts(local=(node("p", slots=0),))).reason is Reason.OVERLOADED
    assert policy.fall_back(facts(decode=())).reason is Reason.NO_DECODE_NODE


def busy(name: str, seconds: float, **more: object) -> PrefillNodeFacts:
    return replace(node(name, **more), queued_s=seconds)  # type: ignore[arg-type]


def test_a_congested_link_is_not_taken_and_the_record_says_so() -> None:
    base = facts()
    east = replace(base.clusters[1], link=replace(LINK, congested=True))
    decision = decide(replace(base, clusters=(base.clusters[0], east)))
    assert (decision.reason, decision.remote) == (Reason.LINK_CONGESTED, False)
    assert [option.barred for option in decision.options] == [None, Bar.CONGESTED]


def test_a_hint_takes_a_congested_link_only_where_no_other_is_there() -> None:
    base = facts(hint=RouteHint.REMOTE)
    east = replace(base.clusters[1], link=replace(LINK, congested=True))
    west = cluster("west", node("p-west", speed=50.0))
    assert decide(replace(base, clusters=(base.clusters[0], east))).remote
    both = decide(replace(base, clusters=(base.clusters[0], east, west)))
    assert both.chosen is not None
    assert both.chosen.cluster == "west"


def test_a_link_that_carries_nothing_is_not_even_hinted_at() -> None:
    base = facts(hint=RouteHint.REMOTE)
    dead = replace(base.clusters[1], link=replace(LINK, bytes_per_s=0.0))
    assert decide(replace(base, clusters=(base.clusters[0], dead))).reason is Reason.HINTED_CLUSTER_UNAVAILABLE


def test_the_remote_cluster_of_least_cost_is_chosen_not_the_first() -> None:
    base = facts()
    [home, east] = base.clusters
    west = cluster("west", node("p-west", speed=2000.0))
    decision = decide(replace(base, clusters=(home, east, west)))
    assert decision.chosen is not None
    assert decision.chosen.cluster == "west"


def test_what_was_never_measured_is_tried_by_one_request_at_a_time() -> None:
    base = facts()
    [home, east] = base.clusters
    unknown = cluster("west", node("p-west"), link=LinkFacts(None, None))
    tried = decide(replace(base, clusters=(home, east, unknown)))
    assert tried.chosen is not None
    assert (tried.chosen.cluster, tried.chosen.predicted_ttft_s) == ("west", None)
    taken = replace(unknown, link=LinkFacts(None, None, queued_bytes=1))
    again = decide(replace(base, clusters=(home, east, taken)))
    assert again.chosen is not None
    assert again.chosen.cluster == "east"
    assert [option.barred for option in again.options] == [None, None, Bar.BEING_MEASURED]


def test_waiting_that_a_way_causes_others_counts_towards_its_cost() -> None:
    """Both are done after 3.01 s; east is idle and slow, so that its 3 s keep nobody waiting."""
    idle = cluster("east", node("p-east", speed=1999 / 3))
    queued = cluster("west", busy("p-west", 2.0, speed=1999.0))
    base = facts(remote=())
    decision = decide(replace(base, clusters=(base.clusters[0], idle, queued)))
    assert {o.cluster: o.predicted_ttft_s for o in decision.options if o.cluster != "local"} == {
        "east": pytest.approx(3.01),
        "west": pytest.approx(3.01),
    }
    assert decision.chosen is not None
    assert decision.chosen.cluster == "east"
    [west] = [o for o in decision.options if o.cluster == "west"]
    assert west.waiting_s == pytest.approx(0.3 * 2.0 * 1.0)
    assert west.cost_s == pytest.approx(3.01 + 0.6)


def test_a_price_counts_at_the_rate_that_the_operator_gives_and_by_the_hour() -> None:
    """East takes 2 s of prefill and 500 kB; at night its price is a tenth."""
    prices = Prices(egress_per_gb=100.0, prefill_per_s=1.0, by_hour=(0.1,) * 6 + (1.0,) * 18)
    base = facts()
    east = replace(base.clusters[1], prices=prices)
    by_day = replace(base, clusters=(base.clusters[0], east), hour=12)
    policy = RoutingPolicy(PolicyValues(seconds_per_unit=10.0))
    day, night = policy.decide(by_day), policy.decide(replace(by_day, hour=3))
    assert day.options[1].price == pytest.approx(1.999 + 0.05)
    assert night.options[1].price == pytest.approx(0.2049)
    assert (day.reason, night.reason) == (Reason.REMOTE_DEARER, Reason.ABOVE_THRESHOLD)
    assert RoutingPolicy().decide(by_day).reason is Reason.ABOVE_THRESHOLD


def test_observed_ttft_outweighs_what_was_predicted() -> None:
    base = facts()
    slow = replace(base.clusters[1], ttft_ratio=12.0)
    decision = decide(replace(base, clusters=(base.clusters[0], slow)))
    assert decision.reason is Reason.REMOTE_SLOWER
    assert decision.options[1].predicted_ttft_s == pytest.approx(12.0 * (1.999 + 0.01))


def test_observe_mode_prefills_at_home_and_keeps_what_it_would_have_done_but_follows_a_hint() -> None:
    policy = RoutingPolicy(PolicyValues(observe=True))
    decision = policy.decide(facts())
    assert (decision.reason, decision.remote) == (Reason.OBSERVED, False)
    assert decision.would_choose is not None
    assert decision.would_choose.cluster == "east"
    assert policy.decide(facts(hint=RouteHint.REMOTE)).remote
    assert policy.decide(facts(tokens=500)).would_choose is None


def test_residency_is_asked_of_the_place_where_the_answer_is_spoken_too() -> None:
    base = facts(regions=frozenset({"eu"}))
    assert decide(base).reason is Reason.RESIDENCY
    eu = replace(base.clusters[0], region="eu")
    assert decide(replace(base, clusters=(eu, base.clusters[1]))).reason is Reason.NO_REMOTE
    both = replace(base.clusters[1], region="eu")
    assert decide(replace(base, clusters=(eu, both))).remote
    assert decide(facts(barred_clusters=frozenset({"local"}))).reason is Reason.RESIDENCY


def test_a_tenant_that_trusts_only_marked_clusters_reaches_no_other() -> None:
    base = facts(trusted_only=True)
    assert decide(base).reason is Reason.NO_REMOTE
    marked = replace(base.clusters[1], trusted=True)
    assert decide(replace(base, clusters=(base.clusters[0], marked))).remote


def test_what_the_decode_node_holds_is_not_sent_and_what_a_prefill_node_has_cached_not_computed() -> None:
    sizes = SizeFacts(per_token=100, windows=((64, 10),), state=5000)
    request = RequestFacts("r", 2001, sizes, chunk_tokens=256, hint=RouteHint.REMOTE)
    decode = (DecodeNodeFacts("d", 0, 4, None, held_tokens=1024),)
    base = replace(facts(decode=decode, remote=(node("p-east", cached=512),)), request=request)
    chosen = decide(base).chosen
    assert chosen is not None
    assert (chosen.start, chosen.transfer_bytes) == (1024, 976 * 100 + 640 + 5000)
    assert (chosen.cached_tokens, chosen.compute_increment) == (512, 1488)


def test_where_all_blocks_are_held_windows_and_states_still_travel_with_the_last_chunk() -> None:
    request = RequestFacts("r", 1025, SizeFacts(per_token=100, state=5000), chunk_tokens=256, hint=RouteHint.REMOTE)
    decode = (DecodeNodeFacts("d", 0, 4, None, held_tokens=1024),)
    chosen = decide(replace(facts(decode=decode), request=request)).chosen
    assert chosen is not None
    assert (chosen.start, chosen.transfer_bytes) == (768, 256 * 100 + 5000)


def test_a_decode_node_with_nearly_all_of_the_prompt_prefills_the_rest_itself() -> None:
    curve = PrefillCurve.at_rate(100.0)
    decode = (DecodeNodeFacts("d", 2, 4, curve, cached_tokens=1920, held_tokens=1920),)
    decision = decide(facts(decode=decode))
    assert decision.reason is Reason.BELOW_THRESHOLD
    assert decision.chosen is not None
    assert (decision.chosen.cluster, decision.chosen.compute_increment) == (None, 79)
    assert decision.chosen.waiting_s == pytest.approx(0.3 * 2 * 0.79)
    cold = (replace(decode[0], cached_tokens=1024, held_tokens=1024),)
    assert all(option.cluster is not None for option in decide(facts(decode=cold)).options)


def test_a_request_for_an_adapter_goes_only_to_nodes_that_serve_it() -> None:
    adapter = frozenset({"law"})
    decode = (DecodeNodeFacts("a", 0, 4, None), DecodeNodeFacts("b", 3, 4, None, loras=adapter))
    plain, law = node("p", speed=1e6), replace(node("q"), loras=adapter)
    base = facts(lora="law", decode=decode, remote=(plain, law))
    chosen = decide(base).chosen
    assert chosen is not None
    assert (chosen.decode_node, chosen.prefill_node) == ("b", "q")
    assert decide(replace(base, decode_nodes=decode[:1])).reason is Reason.OVERLOADED


def test_the_rank_that_holds_a_prefix_is_named() -> None:
    ranks = tuple(replace(node("p-east", cached=rank * 512), dp_rank=rank) for rank in range(3))
    chosen = decide(facts(remote=ranks)).chosen
    assert chosen is not None
    assert (chosen.prefill_node, chosen.prefill_rank, chosen.cached_tokens) == ("p-east", 2, 1024)


def test_a_session_stays_with_its_nodes_where_that_costs_next_to_nothing() -> None:
    session = frozenset({"b", "y"})
    decode = tuple(DecodeNodeFacts(name, 1, 4, None) for name in "xyz")
    for queued, expected in ((10, "b"), (1000, "a")):
        remote = (node("a"), node("b", queued=queued))
        chosen = decide(facts(remote=remote, decode=decode, session_nodes=session)).chosen
        assert chosen is not None
        assert (chosen.prefill_node, chosen.decode_node) == (expected, "y")


ROOMY = LinkFacts(bytes_per_s=1e6, rtt_s=0.01, utilisation=0.1)
SIZES = SizeFacts(per_token=100)


def moving(local_cached: int, remote_cached: int, link: LinkFacts = ROOMY, **more: object) -> Facts:
    request = RequestFacts("r", 4097, SIZES, chunk_tokens=256)
    base = facts(local=(node("p-local", speed=1000.0, cached=local_cached),))
    east = cluster("east", node("p-east", speed=500.0, cached=remote_cached), link=link)
    return replace(base, request=request, clusters=(base.clusters[0], replace(east, outward=link)), can_move=True)


def test_in_abundance_a_prefix_cached_elsewhere_counts_here_and_is_moved() -> None:
    """3584 of 4096 tokens are in east: 512 are left to compute here once 358,400 bytes have come."""
    decision = decide(moving(0, 3584))
    assert decision.reason is Reason.BELOW_THRESHOLD
    chosen = decision.chosen
    assert chosen is not None
    assert chosen.move == Move("east", "p-east", 0, 3584, 358_400, 0.3584 + 0.01)
    assert (chosen.cluster, chosen.compute_increment) == ("local", 512)
    assert chosen.predicted_ttft_s == pytest.approx(0.3584 + 0.01 + 0.512 + 0.01)


@pytest.mark.parametrize(
    "scarce",
    [
        replace(ROOMY, utilisation=0.9),
        replace(ROOMY, utilisation=None),
        replace(ROOMY, congested=True),
        replace(ROOMY, fresh=False),
        replace(ROOMY, bytes_per_s=None),
    ],
)
def test_in_scarcity_each_cluster_has_only_its_own_cache(scarce: LinkFacts) -> None:
    decision = decide(moving(0, 3584, scarce))
    assert decision.reason is not Reason.BELOW_THRESHOLD
    assert all(option.move is None for option in decision.options)


def test_only_what_the_other_does_not_hold_is_moved_and_only_where_nodes_can() -> None:
    base = moving(1024, 3584)
    [move] = [option.move for option in decide(base).options if option.move is not None]
    assert (move.start, move.stop, move.nbytes) == (1024, 3584, 256_000)
    assert all(option.move is None for option in decide(replace(base, can_move=False)).options)


def test_a_prefix_cached_here_is_moved_out_where_that_wins() -> None:
    base = moving(2048, 0)
    [home, east] = base.clusters
    quick = replace(east, nodes=(node("p-east", speed=50_000.0),), outward=replace(ROOMY, bytes_per_s=1e8))
    slow = replace(home, nodes=(node("p-local", speed=100.0, cached=2048),))
    request = replace(base.request, sizes=SizeFacts(per_token=1))
    chosen = decide(replace(base, clusters=(slow, quick), request=request)).chosen
    assert chosen is not None
    assert chosen.move == Move("local", "p-local", 0, 2048, 2048, 2048 / 1e8 + 0.01)
    assert (chosen.cluster, chosen.compute_increment) == ("east", 2048)


@pytest.mark.parametrize(
    ("here", "there"),
    [
        ({"moves": False}, {}),
        ({}, {"moves": False}),
        ({}, {"free_slots": 0}),
        ({"dialable": False}, {"dialable": False}),
        ({}, {"cached_tokens": 4096}),
    ],
)
def test_a_move_needs_two_nodes_that_know_it_can_reach_each_other_and_leave_something_to_compute(
    here: dict[str, Any], there: dict[str, Any]
) -> None:
    base = moving(0, 3584)
    [home, east] = base.clusters
    home = replace(home, nodes=(replace(home.nodes[0], **here),))
    east = replace(east, nodes=(replace(east.nodes[0], **there),))
    decision = decide(replace(base, clusters=(home, east)))
    assert all(option.move is None for option in decision.options)


@pytest.mark.parametrize("dialler", ["local", "east"])
def test_one_of_the_two_may_only_dial(dialler: str) -> None:
    base = moving(0, 3584)
    clusters = tuple(
        replace(one, nodes=(replace(one.nodes[0], dialable=one.name != dialler),)) for one in base.clusters
    )
    chosen = decide(replace(base, clusters=clusters)).chosen
    assert chosen is not None
    assert chosen.move is not None


def test_a_fallback_waits_for_no_other_cluster() -> None:
    chosen = RoutingPolicy().fall_back(moving(0, 3584)).chosen
    assert chosen is not None
    assert (chosen.cluster, chosen.move) == ("local", None)


def test_what_is_cheaper_for_others_but_slower_for_this_request_is_not_allowed() -> None:
    """At home 3 s behind a queue of 2 s, which costs others 0.6 s; in east 3.1 s that nobody waits for."""
    home = replace(cluster("local", busy("p-local", 2.0, speed=1999.0), local=True), link=LinkFacts(1e9, 0.0))
    east = cluster("east", node("p-east", speed=1999 / 3.1))
    decision = decide(replace(facts(), clusters=(home, east)))
    [mine, theirs] = decision.options
    assert (theirs.cost_s or 0.0) < (mine.cost_s or 0.0)
    assert (decision.reason, decision.chosen) == (Reason.REMOTE_SLOWER, mine)


def test_equal_nodes_are_told_apart_by_their_names_whatever_their_order() -> None:
    nodes = tuple(node(name) for name in ("b", "a", "c"))
    for turned in (nodes, nodes[::-1]):
        chosen = decide(facts(remote=turned)).chosen
        assert chosen is not None
        assert chosen.prefill_node == "a"


def queue(seconds: float) -> PrefillNodeFacts:
    return replace(node("p-local", ratio=1.0), queued_tokens=1 if seconds else 0, queued_s=seconds)


def at_home_with(seconds: float, prompt_tokens: int, elsewhere_s: float = 0.0) -> Facts:
    """Home takes 10 ms a token, the east a fixed 2 s and 4 ms: both have the same idle prompts at 333 tokens."""
    quick = replace(
        node("p-east", ratio=1.0),
        prefill=PrefillCurve(2.0, 0.004),
        queued_tokens=1 if elsewhere_s else 0,
        queued_s=elsewhere_s,
    )
    home = replace(queue(seconds), prefill=PrefillCurve(0.0, 0.01))
    link = LinkFacts(bytes_per_s=1e12, rtt_s=0.0)
    base = facts()
    return replace(
        base,
        request=replace(base.request, prompt_tokens=prompt_tokens + 1),
        clusters=(replace(base.clusters[0], nodes=(home,)), cluster("east", quick, link=link)),
        threshold_tokens=1000,
    )


@pytest.mark.parametrize(("tokens", "reason"), [(999, Reason.BELOW_THRESHOLD), (1002, Reason.ABOVE_THRESHOLD)])
def test_where_nobody_waits_the_threshold_is_a_rule(tokens: int, reason: Reason) -> None:
    assert RoutingPolicy().decide(at_home_with(0.0, tokens)).reason is reason


@pytest.mark.parametrize(
    ("tokens", "wait_s", "reason"),
    [
        (990, 1.0, Reason.HOME_BUSY),
        (700, 1.0, Reason.BELOW_THRESHOLD),
        (700, 10.0, Reason.HOME_BUSY),
        (100, 10.0, Reason.BELOW_THRESHOLD),
    ],
)
def test_a_queue_at_home_bends_the_threshold_the_farther_the_longer_it_is(
    tokens: int, wait_s: float, reason: Reason
) -> None:
    assert RoutingPolicy().decide(at_home_with(wait_s, tokens)).reason is reason


def test_a_queue_elsewhere_bends_it_the_other_way() -> None:
    assert RoutingPolicy().decide(at_home_with(0.0, 1010, elsewhere_s=1.0)).reason is Reason.REMOTE_DEARER
    assert RoutingPolicy().decide(at_home_with(0.0, 3000, elsewhere_s=1.0)).reason is Reason.ABOVE_THRESHOLD


def test_a_threshold_that_may_not_bend_is_a_rule_whatever_the_queues() -> None:
    rigid = RoutingPolicy(PolicyValues(threshold_s=0.0))
    assert rigid.decide(at_home_with(100.0, 999)).reason is Reason.BELOW_THRESHOLD
