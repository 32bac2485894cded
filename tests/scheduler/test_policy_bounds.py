"""What holds of every decision, whatever the facts are: each property is a promise that no figure or hint changes."""

from __future__ import annotations

from itertools import permutations

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from scheduler.decision import Decision, Option, Reason
from scheduler.facts import ClusterFacts, Facts
from scheduler.policy import RoutingPolicy
from scheduler.values import PolicyValues
from tests.calm import calm
from tests.scheduler.drawn import any_facts, unhinted_facts

values = st.builds(
    PolicyValues,
    observe=st.booleans(),
    threshold_s=st.sampled_from([0.0, 30.0]),
    waiting_weight_per_s=st.sampled_from([0.0, 0.3]),
    seconds_per_unit=st.sampled_from([0.0, 1.0]),
    session_s=st.sampled_from([0.0, 0.02]),
)
many = settings(calm, max_examples=500)


def both(facts: Facts, given_values: PolicyValues) -> tuple[Decision, Decision]:
    policy = RoutingPolicy(given_values)
    return policy.decide(facts), policy.fall_back(facts)


def taken(decision: Decision) -> list[Option]:
    """What is done, and what a policy that only observes says that it would do."""
    return [option for option in (decision.chosen, decision.would_choose) if option is not None]


def touched(decision: Decision) -> set[str]:
    """Every cluster that the prompt, or KV made from it, would be in."""
    names = {cluster.name for cluster in decision.facts.clusters if cluster.local and taken(decision)}
    for option in taken(decision):
        if option.cluster is not None:
            names.add(option.cluster)
        if option.move is not None:
            names.add(option.move.source_cluster)
    return names


def named(facts: Facts, name: str | None) -> ClusterFacts:
    return next(cluster for cluster in facts.clusters if cluster.name == name)


@many
@given(any_facts, values)
def test_residency_and_trust_are_never_violated_whatever_the_hint(facts: Facts, given_values: PolicyValues) -> None:
    request = facts.request
    for decision in both(facts, given_values):
        for name in touched(decision):
            cluster = named(facts, name)
            assert request.regions is None or cluster.region in request.regions
            assert name not in request.barred_clusters
            if not cluster.local:
                assert cluster.trusted or not request.trusted_only
                assert request.allowed_clusters is None or name in request.allowed_clusters


@many
@given(any_facts, values)
def test_a_dead_link_or_a_lost_cluster_is_never_chosen(facts: Facts, given_values: PolicyValues) -> None:
    for decision in both(facts, given_values):
        for option in taken(decision):
            if option.cluster is None:
                continue
            cluster = named(facts, option.cluster)
            assert cluster.reachable
            assert cluster.local or cluster.link.bytes_per_s is None or cluster.link.bytes_per_s > 0
            if option.move is not None:
                source = named(facts, option.move.source_cluster)
                way = cluster.outward if source.local else source.link
                assert way is not None
                assert way.bytes_per_s is not None
                assert way.bytes_per_s > 0
                assert not way.congested


@many
@given(unhinted_facts, values)
def test_without_a_hint_a_congested_link_is_never_chosen(facts: Facts, given_values: PolicyValues) -> None:
    for option in taken(RoutingPolicy(given_values).decide(facts)):
        if option.cluster is not None and not named(facts, option.cluster).local:
            assert not named(facts, option.cluster).link.congested


@many
@given(any_facts, values)
def test_the_order_in_which_facts_are_listed_does_not_change_a_decision(
    facts: Facts, given_values: PolicyValues
) -> None:
    expected = both(facts, given_values)
    for clusters in permutations(facts.clusters):
        turned = tuple(replace(c, nodes=c.nodes[::-1]) for c in clusters)
        again = both(replace(facts, clusters=turned, decode_nodes=facts.decode_nodes[::-1]), given_values)
        for one, other in zip(again, expected, strict=True):
            assert (one.chosen, one.reason, one.would_choose) == (other.chosen, other.reason, other.would_choose)


@many
@given(any_facts, values)
def test_facts_that_were_written_down_and_read_again_give_the_same_decision_to_the_byte(
    facts: Facts, given_values: PolicyValues
) -> None:
    encoder = msgspec.json.Encoder(order="deterministic")
    again = msgspec.json.decode(encoder.encode(facts), type=Facts)
    same = msgspec.json.decode(encoder.encode(given_values), type=PolicyValues)
    assert again == facts
    for one, other in zip(both(again, same), both(facts, given_values), strict=True):
        assert encoder.encode(one) == encoder.encode(other)


@many
@given(unhinted_facts, values)
def test_the_chosen_option_has_the_least_cost_and_is_never_predicted_slower_than_the_local_way(
    facts: Facts, given_values: PolicyValues
) -> None:
    decision = RoutingPolicy(given_values).decide(facts)
    best = decision.would_choose or decision.chosen
    if best is None:
        return
    assert best.allowed
    home = [o for o in decision.options if o.cluster is None or named(facts, o.cluster).local]
    remotes = [o for o in decision.options if o not in home]
    predicted = [o.predicted_ttft_s for o in home if o.predicted_ttft_s is not None]
    if best in remotes and best.predicted_ttft_s is not None and predicted:
        assert best.predicted_ttft_s <= min(predicted)
    rivals = home if best in home and decision.reason is Reason.BELOW_THRESHOLD else decision.options
    costs = [o.cost_s for o in rivals if o.allowed and o.cost_s is not None]
    if best.cost_s is not None and decision.reason is not Reason.NO_LOCAL_PREFILL:
        assert best.cost_s == min(costs)


@many
@given(unhinted_facts, values)
def test_what_was_never_measured_is_tried_only_where_nobody_is_on_that_link(
    facts: Facts, given_values: PolicyValues
) -> None:
    chosen = RoutingPolicy(given_values).decide(facts).chosen
    if chosen is not None and chosen.predicted_ttft_s is None and chosen.cluster is not None:
        cluster = named(facts, chosen.cluster)
        assert cluster.local or cluster.link.queued_bytes == 0


@many
@given(unhinted_facts, values)
def test_without_a_hint_a_request_leaves_only_above_the_threshold_or_where_home_has_a_queue(
    facts: Facts, given_values: PolicyValues
) -> None:
    decision = RoutingPolicy(given_values).decide(facts)
    if decision.remote and facts.request.prompt_tokens - 1 <= facts.threshold_tokens:
        assert given_values.threshold_s > 0
        assert decision.reason is Reason.HOME_BUSY
        assert any(node.queued_tokens > 0 for cluster in facts.clusters if cluster.local for node in cluster.nodes)


REFUSALS = (
    Reason.NO_DECODE_NODE,
    Reason.NO_PREFILL,
    Reason.HINTED_CLUSTER_UNAVAILABLE,
    Reason.OVERLOADED,
    Reason.RESIDENCY,
)


@many
@given(any_facts, values)
def test_whatever_is_chosen_exists_and_has_room_and_the_quality_allows_it(
    facts: Facts, given_values: PolicyValues
) -> None:
    for decision in both(facts, given_values):
        chosen = decision.chosen
        assert (chosen is None) == (decision.reason in REFUSALS)
        if chosen is None:
            continue
        assert chosen.allowed
        assert chosen.predicted_ttft_s is None or chosen.predicted_ttft_s >= 0
        assert facts.request.quality.allows(chosen.quality)
        assert chosen.codec in facts.request.quality.codecs
        decoders = {(n.node_id, n.dp_rank): n for n in facts.decode_nodes}
        decoder = decoders[chosen.decode_node, chosen.decode_rank]
        assert decoder.free_slots > 0
        assert not facts.request.lora or facts.request.lora in decoder.loras
        if chosen.cluster is None:
            assert not decision.remote
            continue
        home = named(facts, chosen.cluster)
        prefill = {(n.node_id, n.dp_rank): n for n in home.nodes}[chosen.prefill_node or "", chosen.prefill_rank]
        assert prefill.free_slots > 0
        assert not facts.request.lora or facts.request.lora in prefill.loras
        assert decision.remote == (not home.local)
