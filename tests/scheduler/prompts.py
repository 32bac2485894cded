"""Names of blocks for tests: equal beginnings have equal names, as in a real chain."""

from __future__ import annotations

import random
from collections.abc import Sequence
from hashlib import blake2b


def names(*blocks: object) -> list[bytes]:
    """The name of each block of a prompt made of these."""
    found, name = [], b""
    for block in blocks:
        name = blake2b(repr(block).encode(), digest_size=16, key=name).digest()
        found.append(name)
    return found


class Prompts:
    """Random prompts that share beginnings."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._blocks: list[tuple[int, ...]] = [()]
        self._known: dict[tuple[int, ...], bytes] = {}

    def fresh(self, longest: int = 60) -> list[bytes]:
        """A prompt that leaves an earlier one somewhere."""
        rng = self._rng
        begin = rng.choice(self._blocks)
        kinds = rng.choice([2, 1000])
        more = tuple(rng.randrange(kinds) for _ in range(rng.randint(1, rng.choice([1, 5, longest]))))
        self._blocks.append(begin[: rng.randint(0, len(begin))] + more)
        return self._named(self._blocks[-1])

    def earlier(self) -> list[bytes]:
        """One that was there before; the first one is empty."""
        return self._named(self._rng.choice(self._blocks))

    def _named(self, blocks: Sequence[int]) -> list[bytes]:
        path = tuple(blocks)
        return [self._known.setdefault(path[: n + 1], self._rng.randbytes(16)) for n in range(len(path))]
