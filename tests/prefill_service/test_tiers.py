"""Jobs whose prompt's beginning the pool has let go of: the engine checks every byte that it goes on from."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest
from tokenizers import Tokenizer

from kvcache.control import Finished
from kvcache.prefix_cache import Match
from tests.kvcache.tiered import files
from tests.pair import Pair, Side, pair
from tests.prefill_service.test_cached_prefix import SECOND, finish, first_turn, match


async def lost(side: Side) -> None:
    """The pool lets go of all, once it is copied."""
    async with asyncio.timeout(5):
        while side.cache.next_uncopied() is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.002)
    side.cache.evict(side.cache.evictable_pages)
    assert match(side, SECOND) == Match(0, 0)


async def both_lost(nodes: Pair) -> None:
    await first_turn(nodes)
    await nodes.idle()
    await lost(nodes.prefill)
    await lost(nodes.decode)


@pytest.mark.parametrize("start", [0, 320])
async def test_a_prefill_and_its_transfer_go_on_from_what_lies_in_files(
    tokenizer: Tokenizer, tmp_path: Path, start: int
) -> None:
    levels = [files(tmp_path / "p")], [files(tmp_path / "d")]
    async with pair(tokenizer, levels=levels) as nodes:
        await both_lost(nodes)
        job = nodes.job(ids=SECOND, start=start)
        assert isinstance(await finish(nodes, job), Finished)
        assert nodes.prefill.engine.cached[job.transfer] == 256
        assert nodes.prefill.tiers.reports[0].hits == 1
        assert nodes.decode.tiers.reports[0].hits == (1 if start else 0)


async def test_a_prefill_in_place_goes_on_from_what_lies_in_files(tokenizer: Tokenizer, tmp_path: Path) -> None:
    async with pair(tokenizer, levels=((), [files(tmp_path)])) as nodes:
        await first_turn(nodes)
        await nodes.idle()
        await lost(nodes.decode)
        order = msgspec.structs.replace(nodes.job(ids=SECOND).generate, source=None)
        nodes.decode.asking.accept(order)
        ended = await nodes.decode.ended(order.generation)
        assert isinstance(ended, Finished)
        assert ended.cached_tokens == 320
        assert nodes.decode.engine.cached[order.generation] == 320


async def test_a_job_without_its_files_computes_what_it_lacks(tokenizer: Tokenizer, tmp_path: Path) -> None:
    levels = [files(tmp_path / "p")], ()
    async with pair(tokenizer, levels=levels) as nodes:
        await first_turn(nodes)
        await nodes.idle()
        await lost(nodes.prefill)
        await asyncio.to_thread(cut, tmp_path)
        job = nodes.job(ids=SECOND)
        assert isinstance(await finish(nodes, job), Finished)
        assert job.transfer not in nodes.prefill.engine.cached
        assert nodes.prefill.tiers.reports[0].damaged > 0


def cut(directory: Path) -> None:
    for path in directory.rglob("*.*"):
        path.write_bytes(path.read_bytes()[:-1])
