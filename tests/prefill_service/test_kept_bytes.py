"""Whatever ends in the middle, what two nodes keep as exact is what its tokens leave, and exact requests see no other.

Prompts of odd lengths share beginnings, exact and inexact ones, in place and over the wire, while jobs are cancelled,
engines die over kept pages and blocks are evicted. The fake engines check every byte that exact jobs are given.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer

from kvcache.chain import TokenChain
from kvcache.control import Failed, Finished
from kvcache.kept import Block
from kvcache.plan import Piece
from kvcache.quality import Quality
from tests import fake_engine
from tests.pair import CHUNK, FINGERPRINT, GEOMETRY, Pair, Side, pair

BLOCK = GEOMETRY.block_tokens
SPOKEN = [300 + n % 100 for n in range(70)]
LENGTHS = (2, 3, 63, 64, 65, 66, 127, 128, 129, 130, 192, 193, 257, 300, 385, 449, 513, 600)
SENDERS, REQUESTS = 5, 14
MAY_HAPPEN = {"prefix_gone", "engine_lost", "aborted"}

as_bits = fake_engine.piece_bytes


def as_floats(token_ids: Sequence[int], piece: Piece) -> bytes:
    """Numbers that an inexact codec changes."""
    bits = np.frombuffer(as_bits(token_ids, piece), dtype=np.uint32)
    return (bits.astype(np.float32) / 2**31 - 1).astype(np.float32).tobytes()


class Engine(fake_engine.FakeEngine):
    """Lets the jobs in ``lax`` see other bytes, and no other."""

    lax: set[str]

    def _check_holds(self, job: str, *what: object) -> bool:
        self.check_bytes = job not in self.lax
        return super()._check_holds(job, *what)  # type: ignore[arg-type]


class Company:
    """Senders that share a trunk of tokens, and what disturbs them."""

    def __init__(self, nodes: Pair, seed: int) -> None:
        self.nodes = nodes
        self.dice = random.Random(seed)
        self.trunk = [self.dice.randrange(4, 500) for _ in range(700)]
        self.lax: set[str] = set()
        self.engines: list[Engine] = []
        self.ends: Counter[str] = Counter()
        for side in (nodes.prefill, nodes.decode):
            self.start_engine(side)

    def start_engine(self, side: Side) -> None:
        engine = Engine(GEOMETRY, side.pool, side.pages, CHUNK)
        engine.speech, engine.lax = SPOKEN, self.lax
        side.engine = engine
        self.engines.append(engine)

    def prompt(self) -> tuple[int, ...]:
        """The trunk's beginning; of one in two the end is its own, and of one in three an answer follows."""
        dice, length = self.dice, self.dice.choice(LENGTHS)
        ids = self.trunk[:length]
        if dice.random() < 0.5:
            own = dice.randrange(length)
            ids[own:] = [dice.randrange(4, 500) for _ in range(length - own)]
        return tuple([*ids, *SPOKEN, 5] if dice.random() < 0.3 else ids)

    def start(self, ids: Sequence[int], quality: Quality) -> int:
        """Mostly what the decode node holds, sometimes less and sometimes more."""
        chain = TokenChain.of(ids[:-1], BLOCK, fingerprint=FINGERPRINT, salt="")
        most = (len(ids) - 2) // BLOCK * BLOCK
        held = min(self.nodes.decode.cache.match(chain.hashes, quality).held, most)
        return self.dice.choice([held, held, held, held // 2 // BLOCK * BLOCK, min(held + BLOCK, most)])

    async def ask(self) -> None:
        dice, nodes, ids = self.dice, self.nodes, self.prompt()
        quality = Quality.NEAR if dice.random() < 0.3 else Quality.EXACT
        codec = dice.choice(["raw", "lossless"] if quality is Quality.EXACT else ["int8", "fp8"])
        in_place = dice.random() < 0.3
        start = 0 if in_place else self.start(ids, quality)
        job = nodes.job(ids=ids, start=start, codec=codec, quality=quality, max_tokens=dice.choice([1, 64, 70]))
        order = msgspec.structs.replace(job.generate, quality=quality)
        if quality is Quality.NEAR:
            self.lax.update((job.transfer, job.generation))
        if in_place:
            order = msgspec.structs.replace(order, source=None)
        else:
            nodes.prefill.serving.accept(job.prefill)
        nodes.decode.asking.accept(order)
        if dice.random() < 0.3:
            await asyncio.sleep(dice.random() * 0.05)
            nodes.decode.asking.cancel(job.generation)
        ended = await nodes.decode.ended(job.generation, 30.0)
        nodes.prefill.serving.cancel(job.transfer)
        self.ends[type(ended).__name__] += 1
        assert not isinstance(ended, Failed) or ended.cause in MAY_HAPPEN, ended

    async def disturb(self) -> None:
        """Kill engines and evict blocks, until cancelled."""
        while True:
            await asyncio.sleep(0.1 + self.dice.random() * 0.3)
            side = self.dice.choice([self.nodes.prefill, self.nodes.decode])
            if self.dice.random() < 0.5:
                side.engine.lose("killed")
                self.start_engine(side)
            elif not side.room.waiting:
                side.cache.evict(self.dice.randrange(side.cache.evictable_pages // 2 + 1))
            side.cache.check_integrity()


def check_kept(side: Side) -> int:
    """Compare all that is kept as exact with what its tokens leave; how many blocks of it there are."""
    exact = 0
    for block in side.cache._blocks.values():
        ids, begin = prompt_of(block), block.index * BLOCK
        if block.provenance.quality is Quality.EXACT:
            exact += 1
            table = GEOMETRY.blocks_only.table(begin, begin + BLOCK, block.pages)
            for piece in side.engine._pieces(begin, begin + BLOCK, ends=False):
                assert b"".join(side.pool.views(table.extents(piece))) == as_floats(ids, piece)
        if block.snapshot is not None and block.snapshot.provenance.quality is Quality.EXACT:
            table = GEOMETRY.table(len(ids), len(ids), block.snapshot.pages)
            for piece in side.engine._pieces(len(ids), len(ids)):
                assert b"".join(side.pool.views(table.extents(piece))) == as_floats(ids, piece)
    return exact


def prompt_of(block: Block) -> list[int]:
    """All tokens up to the block's end."""
    ids: list[int] = []
    at: Block | None = block
    while at is not None:
        ids[:0], at = at.ids, at.parent
    return ids


async def test_what_is_kept_as_exact_is_exact(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fake_engine, "piece_bytes", as_floats)
    most = GEOMETRY.pages_for(0, 720)
    async with pair(tokenizer, prefill_pages=most * 3 // 2, decode_pages=most * 3 // 2) as nodes:
        company = Company(nodes, seed=4)

        async def sender() -> None:
            for _ in range(REQUESTS):
                await company.ask()

        disturbing = asyncio.create_task(company.disturb())
        try:
            await asyncio.gather(*(sender() for _ in range(SENDERS)))
        finally:
            disturbing.cancel()
            await asyncio.gather(disturbing, return_exceptions=True)
        await nodes.idle(30.0)
        assert company.ends[Finished.__name__] > SENDERS * REQUESTS // 4, company.ends
        assert [engine.faults for engine in company.engines if engine.faults] == []
        assert check_kept(nodes.prefill) + check_kept(nodes.decode) > 0
        assert nodes.decode.cache.figures.hit_tokens > 0
        assert nodes.decode.cache.figures.evicted_pages > 0
