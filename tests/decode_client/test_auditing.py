"""A decode node computes again what another node sent, and says how far the two are apart."""

from __future__ import annotations

import asyncio
import math

import numpy as np
import pytest
from tokenizers import Tokenizer

from decode_client.auditing import KvAuditor
from kvcache.chain import TokenChain
from kvcache.control.audits import AuditKv, KvAudited
from tests.pair import FINGERPRINT, GEOMETRY, Job, Pair, pair


async def fetched(both: Pair, tokens: int = 300) -> Job:
    """A prompt whose KV came from the other node and stays in the cache."""
    job = both.job(tokens)
    both.start(job)
    await both.decode.ended(job.generate.generation)
    await both.idle()
    return job


async def audit(both: Pair, job: Job, auditor: KvAuditor | None = None, origin: str = "east") -> KvAudited:
    told: asyncio.Future[KvAudited] = asyncio.get_running_loop().create_future()
    one = auditor or KvAuditor(both.decode.asking._context)
    one.audit(AuditKv("a", job.generate.token_ids, origin), told.set_result)
    async with asyncio.timeout(10):
        return await told


def kept_pages(both: Pair, job: Job, block: int) -> tuple[int, ...]:
    """Pages of one kept block, by FULL layer."""
    chain = TokenChain.of(job.generate.token_ids, GEOMETRY.block_tokens, fingerprint=FINGERPRINT, salt="")
    return both.decode.cache.find(chain.hashes)[block].pages


async def test_kv_that_is_what_it_should_be_has_no_error(tokenizer: Tokenizer) -> None:
    async with pair(tokenizer) as both:
        job = await fetched(both)
        assert await audit(both, job) == KvAudited("a", 256, 0.0)


@pytest.mark.parametrize("block", [0, 3])
async def test_kv_of_one_layer_of_one_block_that_was_made_up_shows(tokenizer: Tokenizer, block: int) -> None:
    async with pair(tokenizer) as both:
        job = await fetched(both)
        page = kept_pages(both, job, block)[1]
        size = both.decode.pool.page_bytes
        view = np.frombuffer(both.decode.pool.buffer[page * size : page * size + 64], dtype=np.float32)
        before = view.copy()
        view[:] = 3e38
        del view
        result = await audit(both, job)
        assert result.tokens == 256
        assert result.error > 0.05 or math.isinf(result.error)
        both.decode.pool.buffer[page * size : page * size + 64] = before.tobytes()
        assert (await audit(both, job)).error == 0.0


async def test_only_what_that_node_sent_is_compared(tokenizer: Tokenizer) -> None:
    async with pair(tokenizer) as both:
        job = await fetched(both)
        assert await audit(both, job, origin="north") == KvAudited("a", cause="gone")
        other = both.job(300)
        assert await audit(both, other) == KvAudited("a", cause="gone")


async def test_an_audit_takes_no_page_that_somebody_waits_for_and_gives_all_back(tokenizer: Tokenizer) -> None:
    async with pair(tokenizer) as both:
        job = await fetched(both)
        pages = both.decode.room.pool.allocate("someone", both.decode.room.pool.free_pages)
        assert pages is not None
        assert (await audit(both, job)).cause == "no_room"
        both.decode.room.release("someone")
        assert (await audit(both, job)).tokens == 256


async def test_one_audit_is_made_at_a_time_and_a_close_gives_it_up(tokenizer: Tokenizer) -> None:
    async with pair(tokenizer) as both:
        job = await fetched(both)
        auditor = KvAuditor(both.decode.asking._context)
        told: list[KvAudited] = []
        for name in ("first", "second"):
            auditor.audit(AuditKv(name, job.generate.token_ids, "east"), told.append)
        assert told == [KvAudited("second", cause="busy")]
        await auditor.close()
        assert len(told) == 1


async def test_without_an_engine_nothing_is_compared(tokenizer: Tokenizer) -> None:
    async with pair(tokenizer) as both:
        job = await fetched(both)
        both.decode.engine_present = False
        assert (await audit(both, job)).cause == "engine_lost"
        both.decode.engine_present = True


@pytest.mark.parametrize("broken", ["comparing", "submitting"])
async def test_an_audit_that_breaks_is_answered_said_once_and_holds_nothing(
    tokenizer: Tokenizer, broken: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def breaks(*_: object) -> None:
        raise ValueError("as nobody thought it would")

    async with pair(tokenizer) as both:
        job, auditor = await fetched(both), KvAuditor(both.decode.asking._context)
        with monkeypatch.context() as patch:
            patch.setattr(
                *((auditor, "_compared") if broken == "comparing" else (both.decode.engine, "submit")), breaks
            )
            assert await audit(both, job, auditor) == KvAudited("a", cause="broken")
        assert [record.levelname for record in caplog.records if "audit" in record.message] == ["ERROR"]
        assert (await audit(both, job)).tokens == 256
