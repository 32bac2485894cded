"""A record is decided again from its facts and values, and every byte that differs is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings

from scheduler.decision import Decision
from scheduler.facts import Facts
from scheduler.policy import RoutingPolicy
from scheduler.replay import SCHEMA, RecordError, replay
from scheduler.values import PolicyValues
from tests.calm import calm
from tests.scheduler.drawn import any_facts, facts_of

VALUES = PolicyValues(seconds_per_unit=2.0, observe=True)


def record(facts: Facts, **changes: Any) -> dict[str, Any]:
    """A record as the gateway keeps it."""
    policy = RoutingPolicy(VALUES)
    first: Decision = policy.decide(facts)
    plain: dict[str, Any] = msgspec.to_builtins(
        {
            "schema": SCHEMA,
            "id": "r",
            "policy": VALUES,
            "decision": first,
            "retried": [first],
            "fallback_decision": policy.fall_back(facts),
            "attempts": [{"transfer_s": 1.0}],
        }
        | changes,
        order="deterministic",
    )
    return plain


def line(of: dict[str, Any]) -> bytes:
    return msgspec.json.encode(of)


@settings(calm, max_examples=300)
@given(any_facts)
def test_the_same_facts_and_values_give_the_same_bytes(facts: Facts) -> None:
    found = list(replay(line(record(facts))))
    assert [one.kind for one in found] == ["first", "retry", "fallback"]
    assert all(one.same for one in found)
    assert b'"reason"' in found[0].again


def remote_facts() -> Facts:
    """Facts that lead somewhere: of the first seed at which a remote way is taken."""
    return next(facts for seed in range(1000) if RoutingPolicy().decide(facts := facts_of(seed)).remote)


def test_a_record_with_other_values_or_a_changed_answer_is_seen() -> None:
    plain = record(remote_facts())
    assert all(one.same for one in replay(line(plain)))
    for field, value in (("reason", "hint"), ("chosen", None)):
        changed = plain | {"decision": plain["decision"] | {field: value}}
        assert [one.same for one in replay(line(changed))] == [False, True, True]
    other = plain | {"policy": msgspec.to_builtins(PolicyValues())}
    assert not all(one.same for one in replay(line(other)))


def test_a_number_that_was_kept_as_a_whole_one_is_no_difference() -> None:
    plain = record(remote_facts())
    plain["decision"]["facts"]["clusters"][0]["ttft_ratio"] = 1
    again = record(remote_facts())
    again["decision"]["facts"]["clusters"][0]["ttft_ratio"] = 1.0
    assert [one.same for one in replay(line(plain))] == [one.same for one in replay(line(again))]


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        (b'{"id": "r", "decision": null}', "schema 1 cannot be decided again"),
        (b'{"id": "r", "schema": 99}', "schema 99"),
        (b"not json", "no decision record"),
        (b'{"schema": 2, "id": "r", "decision": {"chosen": 5}}', "no decision record"),
        (b"[]", "no decision record"),
    ],
)
def test_what_cannot_be_decided_again_says_why(bad: bytes, why: str) -> None:
    with pytest.raises(RecordError, match=why):
        list(replay(bad))


def no_grid(facts: dict[str, Any]) -> None:
    facts["request"]["chunk_tokens"] = -1


def no_encoders(facts: dict[str, Any]) -> None:
    for cluster in facts["clusters"]:
        for node in cluster["nodes"]:
            node["encoders"] = 0


def endless_codecs(facts: dict[str, Any]) -> None:
    for cluster in facts["clusters"]:
        for node in cluster["nodes"]:
            for codec in node["codecs"]:
                codec["wire_ratio"] = 1e308


@pytest.mark.parametrize("spoil", [no_grid, no_encoders, endless_codecs])
def test_facts_that_no_gateway_has_are_refused_like_a_bad_line(spoil: Callable[[dict[str, Any]], None]) -> None:
    plain = record(remote_facts())
    spoil(plain["decision"]["facts"])
    with pytest.raises(RecordError, match="no facts to decide by"):
        list(replay(line(plain)))


def test_a_request_that_was_never_routed_has_nothing_to_decide_again() -> None:
    assert list(replay(b'{"schema": 2, "id": "r", "decision": null, "fallback_decision": null}')) == []
