"""Many transfers at once, ended at random moments in random ways: each says how it ended, and nothing is left."""

import asyncio
import random

import pytest

from kvcache.control import Cancelled, Failed, Finished
from tests.pair import GEOMETRY, pair

PAGES = GEOMETRY.pages_for(0, 399) * 3 // 2


async def meddle(nodes, jobs, rng):
    """Cancel, cut and abort until all generations have ended."""
    while nodes.decode.asking._generations or nodes.prefill.serving._exports:
        await asyncio.sleep(rng.uniform(0, 0.01))
        job = rng.choice(jobs)
        match rng.randrange(8):
            case 0:
                nodes.prefill.serving.cancel(job.transfer)
            case 1:
                nodes.decode.asking.cancel(job.generation)
            case 2:
                for export in list(nodes.prefill.serving._exports.values()):
                    if export.peer is not None and rng.random() < 0.1:
                        export.peer.close("cut by the test")
            case 3:
                nodes.prefill.serving.accept(job.prefill)
            case 4:
                nodes.decode.asking.accept(job.generate)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("codec", ["raw", "lossless"])
async def test_whatever_happens_every_job_ends_and_every_page_comes_back(tokenizer, seed, codec):
    rng = random.Random(f"{seed} {codec}")
    async with pair(tokenizer, prefill_pages=PAGES, decode_pages=PAGES) as nodes:
        jobs = [nodes.job(rng.randrange(2, 400), codec=codec, seconds=rng.uniform(1.0, 3.0)) for _ in range(30)]
        for job in jobs:
            nodes.start(job)
        await asyncio.wait_for(meddle(nodes, jobs, rng), 20)
        for side, names in ((nodes.prefill, [j.transfer for j in jobs]), (nodes.decode, [j.generation for j in jobs])):
            ends = [m for m in side.reports if isinstance(m, Finished | Failed | Cancelled)]
            about = [getattr(m, "job", None) or m.generation for m in ends]
            assert set(about) <= set(names)
            if side is nodes.decode:
                assert set(about) == set(names)


async def test_a_failed_transfer_never_reaches_the_engine(tokenizer):
    async with pair(tokenizer) as nodes:
        jobs = [nodes.job(300) for _ in range(10)]
        nodes.prefill.engine.fail_prefill_after = 2
        for job in jobs:
            nodes.start(job)
        for job in jobs:
            assert isinstance(await nodes.decode.ended(job.generation), Failed)
        assert nodes.decode.engine.generated == []
