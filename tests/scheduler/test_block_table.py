from __future__ import annotations

import random
from array import array

import numpy as np
import pytest

from scheduler.block_table import BlockTable


def add_many(table: BlockTable, names: list[bytes], run: int) -> array[int]:
    return table.add_many(b"".join(names), run, np.arange(len(names), dtype=np.uint16))


def test_one_by_one_and_in_bulk_it_is_a_dictionary() -> None:
    rng = random.Random(2)
    table = BlockTable(500)
    known: dict[bytes, int] = {}
    for step in range(400):
        count = rng.choice([1, 3, 40, 100])
        if rng.random() < 0.5 and table.room >= count:
            # The low bits choose a chain: only eight of them here, so that chains are long
            fresh = [bytes([rng.randrange(8)]) + bytes(7) + rng.randbytes(8) for _ in range(count)]
            if count == 1:
                known[fresh[0]] = table.add(fresh[0], step, 7)
            else:
                known |= zip(fresh, add_many(table, fresh, step), strict=True)
            assert all(table.run_of[known[name]] == step for name in fresh)
        else:
            gone = rng.sample(sorted(known), min(count, len(known)))
            table.remove(array("I", [known.pop(name) for name in gone]))
            assert all(table.find(name) == 0 for name in gone[:3])
        assert len(table) == len(known)
        names = sorted(known)
        assert table.find_many(b"".join(names)).tolist() == [known[name] for name in names]
        assert [table.find(name) for name in names[:5]] == [known[name] for name in names[:5]]
        assert table.names(array("I", known.values())) == b"".join(known)


def test_names_that_differ_in_one_half_only_are_different() -> None:
    table = BlockTable(10)
    slot = table.add(b"a" * 16, 1, 0)
    assert table.find(b"a" * 8 + b"b" * 8) == table.find(b"b" * 8 + b"a" * 8) == 0
    assert table.find_many(b"a" * 24 + b"b" * 8 + b"a" * 16).tolist() == [slot, 0, slot]


def test_slots_are_used_again() -> None:
    table = BlockTable(4)
    for number in range(20):
        slots = add_many(table, [bytes([number, n]) * 8 for n in range(4)], number)
        assert table.room == 0
        table.remove(slots)
    assert table.room == 4


def test_a_name_of_another_length_is_refused() -> None:
    with pytest.raises(ValueError, match="16 bytes, got 3"):
        BlockTable(4).find(b"abc")


@pytest.mark.parametrize("capacity", [0, -1, 1 << 32])
def test_a_capacity_that_cannot_be_numbered_is_refused(capacity: int) -> None:
    with pytest.raises(ValueError, match="capacity"):
        BlockTable(capacity)
