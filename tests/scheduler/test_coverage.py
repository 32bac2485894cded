from __future__ import annotations

import random

from scheduler import coverage


def bits(blocks: set[int]) -> int:
    return sum(1 << block for block in blocks)


def test_every_operation_does_what_it_does_to_a_set() -> None:
    rng = random.Random(1)
    for _ in range(200):
        held: set[int] = set()
        value = coverage.NOTHING
        for _ in range(20):
            start = rng.randrange(70)
            if rng.random() < 0.6:
                stop = start + rng.randint(1, 40)
                value = coverage.add(value, start, stop)
                held |= set(range(start, stop))
            elif rng.random() < 0.9:
                value = coverage.without(value, start)
                held.discard(start)
            else:
                value = coverage.clip(value, start)
                held = {block for block in held if block < start}
            assert value == coverage.from_bits(bits(held)), "one set, one value"
            assert coverage.to_bits(value) == bits(held)
            assert coverage.extent(value) == max(held, default=-1) + 1
            assert coverage.leading(value) == next(n for n in range(200) if n not in held)
            assert coverage.last_before(value, start) == max((b for b in held if b < start), default=-1) + 1
            assert coverage.holds(value, start) == (start in held)


def test_the_first_blocks_of_a_run_cost_no_bitmap() -> None:
    value = coverage.add(coverage.add(coverage.NOTHING, 0, 5000), 5000, 10_000)
    assert value == 10_000
    assert coverage.without(value, 9999) == 9999


def test_a_hole_that_is_filled_leaves_no_trace() -> None:
    assert coverage.add(coverage.without(10, 5), 5, 6) == 10
