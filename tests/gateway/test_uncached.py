"""A prompt's length as it is cached nowhere at home: of facts as they are, and of facts as a record keeps them."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from gateway.uncached import KeptDecision, uncached_at_home
from tests.scheduler.drawn import facts_of


@given(st.integers(0, 10_000))
def test_a_record_says_what_its_facts_said(seed: int) -> None:
    facts = facts_of(seed)
    record = msgspec.to_builtins({"facts": facts}, order="deterministic", str_keys=True)
    assert uncached_at_home(msgspec.convert(record, KeptDecision).facts) == uncached_at_home(facts)


@given(st.integers(0, 10_000))
def test_it_is_what_the_best_cached_node_at_home_lacks(seed: int) -> None:
    facts = facts_of(seed)
    home = [node for cluster in facts.clusters if cluster.local for node in cluster.nodes]
    lacks = [facts.request.prompt_tokens - 1 - node.cached_tokens for node in [*home, *facts.decode_nodes]]
    assert uncached_at_home(facts) == max(0, min(lacks, default=facts.request.prompt_tokens - 1))
