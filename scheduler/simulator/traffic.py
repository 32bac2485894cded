"""Requests to simulate: when they come, how long they are, and which blocks their prompts begin with."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from scheduler.lengths import FloatArray

WARM_UP = 0.2
IntArray = NDArray[np.int64]
LONGEST_S = 1e8
"""Three years. Links report all along, so that a run of longer than that would hardly end."""


@dataclass(frozen=True, slots=True, eq=False)
class Traffic:
    """Arrivals in ascending seconds from 0, prompt and output tokens of each.

    ``blocks`` names the ``block_tokens``-sized blocks of each prompt, equal names for equal prefixes; empty where the
    trace has none, and then nothing is ever cached. Raises ValueError naming what is at fault.
    """

    arrival_s: FloatArray
    prompt_tokens: IntArray
    output_tokens: IntArray
    blocks: tuple[tuple[int, ...], ...] = field(default=(), repr=False)
    block_tokens: int = 0

    def __post_init__(self) -> None:
        if not len(self.arrival_s) == len(self.prompt_tokens) == len(self.output_tokens) > 0:
            raise ValueError("traffic: arrivals, prompts and outputs must be equally many, and at least one")
        if not np.all(np.isfinite(self.arrival_s)):
            raise ValueError("traffic: arrival_s must be finite")
        if self.arrival_s[-1] > LONGEST_S:
            raise ValueError(
                f"traffic: it lasts {self.arrival_s[-1]:.3g} s, which is beyond {LONGEST_S:.0e}; "
                "raise the rate, or see whether the times of the trace are in the unit of its format"
            )
        if self.arrival_s[0] < 0 or np.any(np.diff(self.arrival_s) < 0):
            raise ValueError("traffic: arrival_s must ascend from 0 or later")
        if self.prompt_tokens.min() < 1 or self.output_tokens.min() < 1:
            raise ValueError("traffic: prompts and outputs have at least one token each")
        if self.blocks and (len(self.blocks) != len(self.arrival_s) or self.block_tokens < 1):
            raise ValueError("traffic: blocks need one tuple a request, and block_tokens")

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def counted(self) -> tuple[float, float]:
        """Between which moments a run is judged: the first fifth of its time is not."""
        last = float(self.arrival_s[-1])
        return last * WARM_UP, last

    @property
    def rate(self) -> float:
        """Mean requests per second; of a single one, one a second."""
        last = float(self.arrival_s[-1])
        return len(self) / last if last > 0 else float(len(self))

    def faster(self, factor: float) -> Traffic:
        """The same requests, ``factor`` times as many a second. Raises ValueError unless it is positive."""
        if not factor > 0:
            raise ValueError(f"a rate can be scaled by a positive factor only, got {factor}")
        return replace(self, arrival_s=self.arrival_s / factor)

    def spread(self, tick_s: float, seed: int) -> Traffic:
        """Requests that a trace reports in ticks, spread evenly at random over the tick that each stands for."""
        shift = np.random.default_rng(seed).random(len(self)) * tick_s
        moved = np.floor(self.arrival_s / tick_s) * tick_s + shift
        return self._ordered(moved)

    def first(self, count: int) -> Traffic:
        """The first so many."""
        return replace(
            self,
            arrival_s=self.arrival_s[:count],
            prompt_tokens=self.prompt_tokens[:count],
            output_tokens=self.output_tokens[:count],
            blocks=self.blocks[:count],
        )

    def uncached_tokens(self) -> IntArray:
        """What an endless cache that all share would leave to compute of each prompt, its last token aside."""
        seen: set[int] = set()
        left = self.prompt_tokens - 1
        for index, blocks in enumerate(self.blocks):
            full = int(self.prompt_tokens[index] - 1) // self.block_tokens
            held = next((n for n, block in enumerate(blocks[:full]) if block not in seen), min(full, len(blocks)))
            left[index] -= held * self.block_tokens
            seen.update(blocks[:full])
        return left

    def _ordered(self, arrival_s: FloatArray) -> Traffic:
        order = np.argsort(arrival_s, kind="stable")
        blocks = tuple(self.blocks[index] for index in order) if self.blocks else ()
        return Traffic(
            arrival_s[order], self.prompt_tokens[order], self.output_tokens[order], blocks, self.block_tokens
        )
