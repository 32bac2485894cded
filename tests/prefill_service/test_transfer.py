"""Whole transfers between two nodes: real services, transport, pools and codecs; the engines are strict fakes."""

import asyncio

import pytest

from kvcache.control import Failed, Finished, PrefillDone, PrefillStarted, TransferDone
from kvcache.digest import kv_digest, piece_digest
from kvcache.plan import plan_transfer
from tests.fake_engine import piece_bytes
from tests.pair import CHUNK, LAYOUT, pair


@pytest.mark.parametrize("codec", ["raw", "lossless"])
@pytest.mark.parametrize("dial", ["in", "out"])
@pytest.mark.parametrize("tokens", [2, 65, 129, 700])
async def test_what_is_committed_is_what_was_exported(tokenizer, codec, dial, tokens):
    async with pair(tokenizer, dial=dial) as nodes:
        job = nodes.job(tokens, codec=codec)
        nodes.start(job)
        assert isinstance(await nodes.decode.ended(job.generation), Finished)
        done = await nodes.decode.told(TransferDone, job.transfer)
        plan = plan_transfer(LAYOUT, 0, tokens - 1, CHUNK)
        digests = b"".join(piece_digest([piece_bytes(job.generate.token_ids, piece)]) for piece in plan.pieces)
        assert done.kv_digest == kv_digest(digests)
        assert done.raw_bytes == plan.nbytes == LAYOUT.s_kv(tokens - 1)
        assert done.codec == codec
        assert (done.wire_bytes == plan.nbytes) == (codec == "raw")
        assert done.transfer_s > 0
        assert done.exposed_s >= 0
        assert (await nodes.prefill.told(PrefillDone, job.transfer)).tokens == tokens - 1
        await nodes.prefill.told(PrefillStarted, job.transfer)


async def test_a_commit_that_overtakes_the_engines_last_word_hides_nothing(tokenizer):
    async with pair(tokenizer) as nodes:
        nodes.prefill.engine.ending.clear()
        job = nodes.job()
        nodes.start(job)
        assert isinstance(await nodes.decode.ended(job.generation), Finished)
        assert not [m for m in nodes.prefill.reports if isinstance(m, PrefillDone)]
        nodes.prefill.engine.ending.set()
        await nodes.prefill.told(PrefillDone, job.transfer)
        await nodes.idle()
        assert not [m for m in nodes.prefill.reports if isinstance(m, Failed)]


@pytest.mark.parametrize("loss", ["engine", "connection"])
async def test_a_loss_after_the_commit_is_no_failure(tokenizer, loss):
    async with pair(tokenizer) as nodes:
        nodes.prefill.engine.ending.clear()
        job = nodes.job()
        nodes.start(job)
        assert isinstance(await nodes.decode.ended(job.generation), Finished)
        if loss == "engine":
            nodes.prefill.engine.lose("killed by the test")
        else:
            nodes.prefill.serving._exports[job.ticket.transfer].peer.close("cut by the test")
            await asyncio.sleep(0.05)
            nodes.prefill.engine.ending.set()
        await nodes.idle()
        assert not [m for m in nodes.prefill.reports if isinstance(m, Failed)]
