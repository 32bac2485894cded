"""Routing decisions: the threshold, hints, what is reachable, and that a decision depends on facts alone."""

from __future__ import annotations

from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from kvcache.quality import Quality
from scheduler.decision import Decision, Reason, Refusal
from scheduler.facts import (
    ClusterFacts,
    CodecFacts,
    DecodeNodeFacts,
    Facts,
    LinkFacts,
    PrefillCurve,
    PrefillNodeFacts,
    RequestFacts,
    RouteHint,
    SizeFacts,
)
from scheduler.policy import PolicyValues, RoutingPolicy
from tests.calm import calm
from tests.scheduler.codecs import codec_sets

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
    assert decide(facts(tokens=500, local=(node("p-local", slots=0),))).reason is Refusal.OVERLOADED


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


@pytest.mark.parametrize(("seconds", "reason"), [(25.0, Reason.ABOVE_THRESHOLD), (25.2, Reason.REMOTE_SLOWER)])
def test_a_difference_within_the_error_of_predictions_does_not_overrule_the_threshold(
    seconds: float, reason: Reason
) -> None:
    """The local way is predicted to take 19.99 s: 1.25 times that and 0.05 s are 25.04 s."""
    link = LinkFacts(bytes_per_s=1_000_000 / seconds, rtt_s=None)
    base = facts()
    decision = decide(replace(base, clusters=(base.clusters[0], cluster("east", node("p-east", ratio=1.0), link=link))))
    assert decision.reason is reason


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
        assert (decision.chosen, decision.reason) == (None, Refusal.HINTED_CLUSTER_UNAVAILABLE)


def test_a_cluster_that_is_not_permitted_is_not_even_an_option() -> None:
    decision = decide(facts(allowed_clusters=frozenset({"west"})))
    assert decision.reason is Reason.NO_REMOTE
    assert [option.cluster for option in decision.options] == ["local"]


def test_an_unreachable_cluster_is_not_used() -> None:
    base = facts()
    drained = replace(base.clusters[1], reachable=False)
    assert decide(replace(base, clusters=(base.clusters[0], drained))).reason is Reason.NO_REMOTE


def test_without_decode_nodes_or_with_full_ones_there_is_no_decision() -> None:
    assert decide(facts(decode=())).reason is Refusal.NO_DECODE_NODE
    assert decide(facts(decode=(DecodeNodeFacts("d", 4, 0, None),))).reason is Refusal.OVERLOADED


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
    assert policy.fall_back(facts(local=(node("p", slots=0),))).reason is Refusal.OVERLOADED
    assert policy.fall_back(facts(decode=())).reason is Refusal.NO_DECODE_NODE


speeds = st.one_of(st.none(), st.builds(PrefillCurve, st.floats(0, 1), st.floats(1e-6, 1.0), st.floats(0, 1e-6)))
prefill_nodes = st.builds(
    PrefillNodeFacts,
    st.sampled_from("abcdef"),
    st.integers(0, 10_000),
    st.integers(0, 2),
    speeds,
    st.integers(0, 3000),
    st.integers(0, 3000),
    codec_sets(),
)
decode_nodes = st.builds(
    DecodeNodeFacts,
    st.sampled_from("vwxyz"),
    st.integers(0, 4),
    st.integers(0, 2),
    speeds,
    st.integers(0, 3000),
    st.integers(0, 3000),
    codec_sets(),
)
links = st.builds(
    LinkFacts,
    st.one_of(st.none(), st.floats(1.0, 1e10)),
    st.one_of(st.none(), st.floats(0, 1)),
    st.integers(0, 10**9),
)


@st.composite
def any_facts(draw: st.DrawFn) -> Facts:
    used: set[str] = set()
    clusters = []
    for at, name in enumerate(("local", "east", "west")):
        drawn = draw(st.lists(prefill_nodes, max_size=3, unique_by=lambda n: n.node_id))
        nodes = tuple(replace(n, node_id=f"{name}-{n.node_id}") for n in drawn)
        used |= {n.node_id for n in nodes}
        clusters.append(ClusterFacts(name, at == 0, draw(st.booleans()) and bool(nodes), nodes, draw(links)))
    request = RequestFacts(
        "r",
        draw(st.integers(0, 4000)),
        SizeFacts(draw(st.integers(0, 10**5)), ((511, draw(st.integers(0, 10**4))),), draw(st.integers(0, 10**7))),
        draw(st.sampled_from([0, 256])),
        draw(st.sampled_from(RouteHint)),
        draw(st.sampled_from([None, "local", "east", "nowhere"])),
        draw(st.sampled_from([None, frozenset[str](), frozenset({"east"})])),
        draw(st.sampled_from(Quality)),
    )
    decoders = tuple(draw(st.lists(decode_nodes, max_size=3, unique_by=lambda n: n.node_id)))
    return Facts(request, tuple(clusters), decoders, draw(st.integers(0, 3000)))


@calm
@given(any_facts())
def test_whatever_is_chosen_exists_is_reachable_permitted_and_has_room(given_facts: Facts) -> None:
    for decision in (RoutingPolicy().decide(given_facts), RoutingPolicy().fall_back(given_facts)):
        chosen = decision.chosen
        assert (chosen is None) == isinstance(decision.reason, Refusal)
        if chosen is None:
            continue
        assert chosen.allowed
        assert chosen.predicted_ttft_s is None or chosen.predicted_ttft_s >= 0
        assert given_facts.request.quality.allows(chosen.quality)
        assert chosen.codec in given_facts.request.quality.codecs
        [decoder] = [n for n in given_facts.decode_nodes if n.node_id == chosen.decode_node]
        assert decoder.free_slots > 0
        if chosen.cluster is None:
            assert not decision.remote
            continue
        [home] = [c for c in given_facts.clusters if c.name == chosen.cluster]
        assert home.reachable
        [prefill] = [n for n in home.nodes if n.node_id == chosen.prefill_node]
        assert prefill.free_slots > 0
        permitted = given_facts.request.allowed_clusters
        assert home.local or permitted is None or home.name in permitted
        assert decision.remote == (not home.local)


@calm
@given(any_facts())
def test_the_order_in_which_facts_are_listed_does_not_change_a_decision(given_facts: Facts) -> None:
    expected = RoutingPolicy().decide(given_facts)
    for clusters in permutations(given_facts.clusters):
        turned = tuple(replace(c, nodes=c.nodes[::-1]) for c in clusters)
        again = RoutingPolicy().decide(
            replace(given_facts, clusters=turned, decode_nodes=given_facts.decode_nodes[::-1])
        )
        assert (again.chosen, again.reason) == (expected.chosen, expected.reason)


@calm
@given(any_facts())
def test_without_a_hint_a_request_leaves_only_above_the_threshold(given_facts: Facts) -> None:
    plain = replace(given_facts, request=replace(given_facts.request, hint=RouteHint.NONE))
    decision = RoutingPolicy().decide(plain)
    if decision.remote:
        assert plain.request.prompt_tokens - 1 > plain.threshold_tokens
