"""The codec of a transfer, live: what nodes say of their codecs and of links decides, within the request's quality."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.config import FallbackPolicy
from gateway.sessions import codec_quality
from kvcache.control import CodecWork, GenerateJob, PrefillJob
from kvcache.quality import Quality
from kvcache.wire import Role
from tests.gateway.conftest import Open, Stage
from tests.gateway.fakes import FakeNode, Script, answer_well

MIB = 1 << 20
CODECS = (
    CodecWork("lossless", MIB, int(0.7 * MIB), MIB / 8e8, MIB, MIB / 2e9),
    CodecWork("int8", MIB, int(0.45 * MIB), MIB / 2e8, MIB, MIB / 2e8),
    CodecWork("int4", MIB, int(0.25 * MIB), MIB / 2e8, MIB, MIB / 2e8),
)
QUALITY = "x-prfaas-kv-quality"
REMOTE = {"x-prfaas-route-hint": "remote"}


async def throttled(one: Stage, **options: Any) -> tuple[FakeNode, FakeNode]:
    """A remote cluster over a link that is known to be slow: 20 kB/s."""
    one.register("east")
    prefill = await one.node("p-east", Role.PREFILL, cluster="east", codecs=CODECS)
    decode = await one.node("d", Role.DECODE, codecs=CODECS, **options)
    one.gateway.registry.link("east").observe(20_000, 1.0, 1.0, asyncio.get_running_loop().time())
    return prefill, decode


def answering(codec: str) -> Script:
    async def script(node: FakeNode, job: GenerateJob) -> None:
        node.codec = codec
        await answer_well(node, job)

    return script


@pytest.mark.parametrize(("quality", "codec"), [(None, "lossless"), ("exact", "lossless"), ("near", "int8")])
async def test_a_slow_link_gets_the_smallest_codec_that_the_request_allows(
    stage: Open, quality: str | None, codec: str
) -> None:
    one = await stage()
    prefill, decode = await throttled(one, on_generate=answering(codec))
    answer = await one.complete(words=60, headers=REMOTE | ({QUALITY: quality} if quality else {}))
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-prfaas-route"] == "remote:east"
    assert answer.headers["x-prfaas-kv-codec"] == codec
    [prefill_job], [generate_job] = prefill.jobs(PrefillJob), decode.jobs(GenerateJob)
    assert prefill_job.codec == codec
    assert generate_job.source.quality == (quality or "exact")
    record = await one.decision(answer.headers["x-request-id"])
    [attempt] = record["attempts"]
    assert (attempt["codec"], attempt["exactness"]) == (codec, "near" if codec == "int8" else "exact")
    assert attempt["quality"] == (quality or "exact")
    [chosen] = [option for option in record["decision"]["options"] if option["cluster"] == "east"]
    predicted = {one["name"]: one["predicted_ttft_s"] for one in chosen["codecs"]}
    assert predicted["int4"] < predicted["int8"] < predicted["lossless"]
    assert predicted[codec] == chosen["predicted_ttft_s"]
    assert {one["name"] for one in chosen["codecs"] if one["allowed"]} == (
        {"lossless", "int8"} if quality == "near" else {"lossless"}
    )


async def test_what_a_node_says_of_its_real_transfers_changes_the_choice(stage: Open) -> None:
    one = await stage()
    prefill, decode = await throttled(one, on_generate=answering("lossless"))
    slow = CodecWork("int8", 100 * MIB, 45 * MIB, 100 * MIB / 1e3)
    await prefill.heartbeat(codecs=(slow,))
    session = one.gateway.registry.node("p-east")
    assert session is not None
    await one.until(lambda: session.codecs.facts(0.0)[1].encode_bytes_per_s < 2e3)
    answer = await one.complete(words=60, headers=REMOTE | {QUALITY: "near"})
    assert answer.headers["x-prfaas-kv-codec"] == "lossless"
    assert decode.jobs(GenerateJob)[0].source.quality is Quality.NEAR


async def test_before_anything_has_crossed_a_link_the_choice_is_what_is_safe(stage: Open) -> None:
    one = await stage()
    one.register("east")
    prefill = await one.node("p-east", Role.PREFILL, cluster="east", codecs=CODECS)
    await one.node("d", Role.DECODE, codecs=CODECS)
    answer = await one.complete(words=60, headers=REMOTE | {QUALITY: "compact"})
    assert answer.headers["x-prfaas-kv-codec"] == "lossless"
    assert prefill.jobs(PrefillJob)[0].codec == "lossless"


@pytest.mark.parametrize(("quality", "codec"), [("exact", "int8"), ("near", "int4"), ("compact", "something")])
async def test_an_answer_from_kv_beyond_the_quality_does_not_reach_the_client(
    stage: Open, quality: str, codec: str
) -> None:
    one = await stage(fallback=FallbackPolicy.FAIL)
    await throttled(one, on_generate=answering(codec))
    answer = await one.complete(words=60, headers=REMOTE | {QUALITY: quality})
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "codec")


async def test_without_a_transfer_the_header_says_none(stage: Open) -> None:
    one = await stage()
    await one.node("d", Role.DECODE)
    assert (await one.complete()).headers["x-prfaas-kv-codec"] == "none"


async def test_a_quality_that_does_not_exist_is_refused_by_name(stage: Open) -> None:
    one = await stage()
    await one.pair()
    answer = await one.complete(headers={QUALITY: "perfect"})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == QUALITY


async def test_the_fallback_keeps_the_quality(stage: Open) -> None:
    one = await stage()
    remote, decode = await throttled(one, on_generate=answering("int4"))
    local = await one.node("p-local", Role.PREFILL)

    async def failing_first(node: FakeNode, job: GenerateJob) -> None:
        node.codec = "int4" if len(node.jobs(GenerateJob)) == 1 else "raw"
        await answer_well(node, job)

    decode.on_generate = failing_first
    answer = await one.complete(words=60, headers=REMOTE)
    assert answer.headers["x-prfaas-route-reason"] == "fallback"
    assert answer.headers["x-prfaas-kv-codec"] == "raw"
    assert [job.source.quality for job in decode.jobs(GenerateJob)] == [Quality.EXACT, Quality.EXACT]
    assert (len(remote.jobs(PrefillJob)), len(local.jobs(PrefillJob))) == (1, 1)


@pytest.mark.parametrize(
    ("name", "quality"),
    [
        ("raw", Quality.EXACT),
        ("lossless,state=raw", Quality.EXACT),
        ("lossless,state=fp16", Quality.NEAR),
        ("raw,full.k=int4", Quality.COMPACT),
        ("transform:abc,state=lossless", Quality.COMPACT),
        ("int2", None),
        ("raw,state", None),
        ("raw," * 100, None),
        ("", None),
    ],
)
def test_a_set_of_codecs_needs_what_its_least_exact_member_does(name: str, quality: Quality | None) -> None:
    assert codec_quality(name) is quality
