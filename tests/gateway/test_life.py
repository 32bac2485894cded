"""The life of a request over real sockets: both legs, failures before and after the first token, fallback, cancel."""

from __future__ import annotations

from typing import Any

from kvcache.control import GenerateJob, PrefillJob
from tests.gateway.conftest import Open


async def test_a_short_prompt_is_prefilled_at_home_and_says_so(stage: Open) -> None:
    one = await stage()
    prefill, decode = await one.pair()
    answer = await one.complete()
    assert answer.status_code == 200, answer.text
    assert answer.json()["choices"][0]["text"] == "t0 t1 t2 "
    assert answer.headers["x-prfaas-route"] == "local"
    assert answer.headers["x-prfaas-route-reason"] == "below_threshold"
    assert answer.headers["x-prfaas-prefill"] == "node"
    [job] = prefill.jobs(PrefillJob)
    assert job.codec == "raw"
    assert len(decode.jobs(GenerateJob)) == 1


async def test_a_long_prompt_goes_to_the_remote_cluster(stage: Open) -> None:
    one = await stage()
    prefill, _ = await one.pair("east")
    await one.node("p-local", prefill.join.role)
    answer = await one.complete(words=60)
    assert answer.headers["x-prfaas-route"] == "remote:east"
    assert answer.headers["x-prfaas-route-reason"] == "above_threshold"
    [job] = prefill.jobs(PrefillJob)
    assert job.codec == "lossless"
    record: dict[str, Any] = await one.decision(answer.headers["x-request-id"])
    [attempt] = record["attempts"]
    assert attempt["kv_digest"] == "01" * 16
    assert (attempt["raw_bytes"], attempt["wire_bytes"]) == (4096, 2048)
    assert attempt["range"] == [0, len(job.token_ids) - 1]
    assert record["usage"]["completion_tokens"] == 3
