"""Two gateway processes over one real Redis: kill -9 of one costs its open streams and nothing else."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.bench.two_gateways import KNOWN, reused
from tests.models import tiny_model
from tests.redis_server import needs_redis
from tests.stacks import eventually, some_ids
from tests.two_gateways import FIRST, SECOND, TwoGateways, two_gateways

pytestmark = [pytest.mark.long, pytest.mark.timeout(300), needs_redis]

KNOWN_PROMPT = some_ids(KNOWN + 10, seed=7)
LONG = 2500
"""Tokens of a stream that goes on over several heartbeats of its node."""


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoGateways]:
    path = tmp_path_factory.mktemp("two")
    with two_gateways(tiny_model("llama", path / "model"), path / "logs") as found:
        yield found


def test_nodes_that_were_told_of_one_gateway_serve_both(both: TwoGateways) -> None:
    for name in both.urls:
        answer = both.complete(name, "ab ab", 3)
        assert answer.status_code == 200, answer.text
    nodes = {name: set(both.nodes(name)) for name in both.urls}
    assert nodes[FIRST] == nodes[SECOND] == {"prefill", "decode"}


def test_a_killed_gateway_takes_its_own_streams_along_and_prefix_hits_stay(both: TwoGateways) -> None:
    reused(both, FIRST, KNOWN_PROMPT)
    streams = [both.stream(name, some_ids(12, seed=n), LONG) for n, name in enumerate((FIRST, SECOND, FIRST, SECOND))]
    assert eventually(lambda: all(stream.chunks > 3 for stream in streams), 20.0), streams
    both.kill(FIRST)
    assert reused(both, SECOND, KNOWN_PROMPT) == 1.0
    assert eventually(lambda: both.nodes(SECOND)["decode"]["heartbeat"]["running"] == 2, 5.0)
    assert eventually(lambda: all(stream.ended for stream in streams), 60.0)
    assert [(stream.done, stream.error != "") for stream in streams] == [(False, True), (True, False)] * 2
    assert [stream.finish for stream in streams] == [None, "length"] * 2
    assert eventually(lambda: both.call("GET", SECOND, "/v1/status").json()["shared"]["leads"], 5.0)


def test_its_successor_at_the_same_address_is_joined_and_knows_what_nodes_hold(both: TwoGateways) -> None:
    both.start(FIRST)
    both.await_nodes(FIRST)
    assert reused(both, FIRST, KNOWN_PROMPT) == 1.0
    assert both.nodes(FIRST)["decode"]["heartbeat"]["running"] == 0
