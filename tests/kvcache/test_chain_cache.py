from __future__ import annotations

import random
from typing import Any

import pytest

from kvcache import chain_cache
from kvcache.chain_cache import STRETCH_BLOCKS, ChainCache
from kvcache.hashing import block_hashes

MODEL: dict[str, Any] = {"fingerprint": "model", "salt": "tenant"}
STRETCH = STRETCH_BLOCKS * 4


def test_the_names_are_those_of_the_plain_chain_whatever_was_hashed_before() -> None:
    rng = random.Random(1)
    cache = ChainCache()
    history: list[int] = []
    for _ in range(40):
        history = history[: rng.randint(0, len(history))] + [rng.randrange(1 << 32) for _ in range(rng.randrange(900))]
        for settings in (MODEL, {**MODEL, "salt": "other"}, {**MODEL, "lora": "l"}, {**MODEL, "fingerprint": "f"}):
            assert cache.block_hashes(history, 4, **settings) == block_hashes(history, 4, **settings)


def test_what_an_earlier_prompt_began_with_is_not_hashed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = []
    plain = chain_cache.packed_hashes

    def counted(key: bytes, tokens: bytes, block_tokens: int) -> list[bytes]:
        hashed.append(len(tokens) // 4)
        return plain(key, tokens, block_tokens)

    monkeypatch.setattr(chain_cache, "packed_hashes", counted)
    cache = ChainCache()
    first = list(range(3 * STRETCH + 10))
    cache.block_hashes(first, 4, **MODEL)
    assert sum(hashed) == len(first)
    hashed.clear()
    cache.block_hashes([*first, *range(STRETCH)], 4, **MODEL)
    assert sum(hashed) == STRETCH + 10


def test_stretches_that_look_alike_are_told_apart_by_their_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_cache, "xxh3_64_intdigest", lambda _: 7)
    cache = ChainCache()
    for number in range(3):
        ids = [number] * STRETCH
        assert cache.block_hashes(ids, 4, **MODEL) == block_hashes(ids, 4, **MODEL)


def test_it_never_takes_more_than_its_capacity_and_the_least_recently_used_go() -> None:
    cache = ChainCache(5 * STRETCH * 24)
    for number in range(30):
        cache.block_hashes([0] * STRETCH, 4, **MODEL)
        cache.block_hashes([number] * STRETCH, 4, **MODEL)
        assert cache.nbytes <= 5 * STRETCH * 24
    assert cache.nbytes > 3 * STRETCH * 24
    assert any(tokens == bytes(STRETCH * 4) for tokens, _ in cache._kept.values())


def test_what_the_plain_chain_refuses_is_refused() -> None:
    with pytest.raises(ValueError, match="block_tokens"):
        ChainCache().block_hashes([1], 0, **MODEL)
    with pytest.raises(ValueError, match="token_ids"):
        ChainCache().block_hashes([-1], 4, **MODEL)
