"""Prompts as caches see them, by names of blocks: families that share beginnings, and prompts that share nothing.

Names are random bytes instead of hashes of tokens: the index never looks at more than their equality. A family follows
from its number, so that nothing of it need be kept while memory is measured.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from scheduler.prefix_index import PrefixIndex

BRANCHES = 6
LOOSE = 6
EVENT_BLOCKS = 128
HOLDERS = 4
NAME_BYTES = 16


@dataclass(frozen=True, slots=True)
class Prompt:
    """The names of a prompt's blocks, and after how many of them it left another of its family."""

    names: list[bytes]
    fork: int


@dataclass(frozen=True, slots=True)
class Reports:
    """What one node reports of a prompt: its first ``blocks``, and then that ``hole`` is gone."""

    node: str
    names: list[bytes]
    blocks: int
    hole: int | None

    def tell(self, index: PrefixIndex) -> None:
        """As events, in batches of a prefill chunk's size."""
        for first in range(0, self.blocks, EVENT_BLOCKS):
            piece = self.names[first : min(first + EVENT_BLOCKS, self.blocks)]
            index.stored(self.node, piece, self.names[first - 1] if first else None)
        index.snapshot(self.node, self.names[self.blocks - 1])
        if self.hole is not None:
            index.removed(self.node, [self.names[self.hole]])


def family(number: int, longest: int) -> list[Prompt]:
    """A trunk, prompts that leave it or each other anywhere, and some short ones of their own."""
    rng = np.random.default_rng([1, number])
    prompts = [Prompt(fresh_names(rng, int(rng.integers(longest // 8 + 1, longest + 1))), 0)]
    for _ in range(BRANCHES):
        left = prompts[rng.integers(len(prompts))].names
        fork = int(rng.integers(1, len(left) + 1))
        more = fresh_names(rng, int(rng.integers(longest // 128 + 1, longest // 4 + 2)))
        prompts.append(Prompt((left[:fork] + more)[:longest], fork))
    for _ in range(LOOSE):
        prompts.append(Prompt(fresh_names(rng, int(rng.integers(1, longest // 16 + 2))), 0))
    return prompts


def reports(number: int, prompts: list[Prompt], nodes: list[str]) -> Iterator[Reports]:
    """Who holds what of a family: one to four nodes each prompt, half of them all of it, one in eight with a hole."""
    rng = np.random.default_rng([2, number])
    for prompt in prompts:
        count = len(prompt.names)
        for node in rng.choice(nodes, min(len(nodes), int(rng.integers(1, HOLDERS + 1))), replace=False):
            blocks = count if rng.random() < 0.5 else int(rng.integers(1, count + 1))
            hole = int(rng.integers(0, blocks)) if rng.random() < 1 / 8 else None
            yield Reports(str(node), prompt.names, blocks, hole)


def question(rng: np.random.Generator, families: int, blocks: int) -> list[bytes]:
    """A prompt that follows a known one to some depth and goes on by itself, ``blocks`` long."""
    prompts = family(int(rng.integers(families)), blocks)
    known = prompts[rng.integers(len(prompts))].names
    kept = known[: int(rng.integers(1, len(known) + 1))]
    return kept + fresh_names(rng, blocks - len(kept))


def fresh_names(rng: np.random.Generator, count: int) -> list[bytes]:
    """Names that nothing else has."""
    joined = rng.bytes(NAME_BYTES * count)
    return [joined[first : first + NAME_BYTES] for first in range(0, len(joined), NAME_BYTES)]
