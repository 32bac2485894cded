from __future__ import annotations

import asyncio
from typing import Any

from gateway.config import FallbackPolicy
from kvcache.control import PrefillDone, PrefillStarted
from tests.gateway.conftest import Open
from tests.gateway.fakes import FakeNode, failing, finish, never, receive_kv, transfer_of


async def engine_lost_a_moment_later(node: FakeNode, job: Any) -> None:
    await asyncio.sleep(0.1)
    await failing("prefill", "engine_lost")(node, job)


async def test_the_leg_that_broke_names_the_cause_even_if_the_other_speaks_first(stage: Open) -> None:
    one = await stage(fallback=FallbackPolicy.FAIL)
    await one.pair("east", on_prefill=engine_lost_a_moment_later, on_generate=failing("transfer", "aborted"))
    answer = await one.complete(words=60)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "engine_lost"


async def test_hearsay_ends_the_attempt_where_the_other_leg_stays_silent(stage: Open) -> None:
    one = await stage(fallback=FallbackPolicy.FAIL)
    await one.pair("east", on_prefill=never, on_generate=failing("transfer", "aborted"))
    answer = await one.complete(words=60)
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "aborted"


async def tells_a_cached_prefix(node: FakeNode, job: Any) -> None:
    """A prefill that went on from its cache."""
    transfer = transfer_of(node, job.ticket)
    await node.send(PrefillStarted(transfer, cached_tokens=32))
    await node.send(PrefillDone(transfer, 0.01, len(job.token_ids) - 33, 32))


async def test_usage_counts_the_tokens_that_the_prefill_node_did_not_compute(stage: Open) -> None:
    one = await stage()
    await one.pair("east", on_prefill=tells_a_cached_prefix)
    answer = await one.complete(words=60)
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}


async def test_usage_counts_them_also_where_the_prefill_node_is_heard_after_the_transfer(stage: Open) -> None:
    received = asyncio.Event()

    async def heard_late(node: FakeNode, job: Any) -> None:
        await received.wait()
        await tells_a_cached_prefix(node, job)

    async def answer_later(node: FakeNode, job: Any) -> None:
        await receive_kv(node, job)
        received.set()
        await asyncio.sleep(0.1)
        await finish(node, job, tokens=0)

    one = await stage()
    await one.pair("east", on_prefill=heard_late, on_generate=answer_later)
    answer = await one.complete(words=60)
    assert answer.status_code == 200
    assert answer.json()["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
    (attempt,) = (await one.decision(answer.headers["x-request-id"]))["attempts"]
    assert "prefill_s" in attempt, "what it took is learnt, too"
