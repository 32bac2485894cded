"""Which blocks of a run something holds, as one integer: most hold a run's first blocks, and then it is their number.

A value of 0 or more says "the first so many". Anything with a hole in it is the complement of a bitmap, which is
negative (bit i is block i). Each set has exactly one value. Small integers cost no memory of their own, bitmaps one bit
a block.
"""

from __future__ import annotations

NOTHING = 0


def from_bits(bits: int) -> int:
    """The value of a bitmap."""
    return ~bits if bits & (bits + 1) else bits.bit_length()


def to_bits(value: int) -> int:
    """The bitmap of a value."""
    return (1 << value) - 1 if value >= 0 else ~value


def leading(value: int) -> int:
    """How many blocks are held before the first that is not."""
    if value >= 0:
        return value
    bits = ~value
    return (bits ^ (bits + 1)).bit_length() - 1


def extent(value: int) -> int:
    """One more than the last block that is held."""
    return value if value >= 0 else (~value).bit_length()


def last_before(value: int, stop: int) -> int:
    """One more than the last block below ``stop`` that is held; 0 with none."""
    if value >= 0:
        return min(value, stop)
    bits = ~value
    last = bits.bit_length()
    return last if last <= stop else (bits & ((1 << stop) - 1)).bit_length()


def holds(value: int, block: int) -> bool:
    """Whether ``block`` is held."""
    return block < value if value >= 0 else bool(~value >> block & 1)


def count(value: int) -> int:
    """How many blocks are held."""
    return value if value >= 0 else (~value).bit_count()


def add(value: int, start: int, stop: int) -> int:
    """With blocks [start, stop), which must not be empty."""
    if 0 <= value >= start:
        return max(value, stop)
    return from_bits(to_bits(value) | ((1 << (stop - start)) - 1) << start)


def without(value: int, block: int) -> int:
    """Without ``block``, which need not have been held."""
    if value >= 0:
        if block >= value:
            return value
        if block == value - 1:
            return block
    return from_bits(to_bits(value) & ~(1 << block))


def clip(value: int, stop: int) -> int:
    """Without everything from ``stop`` on."""
    return min(value, stop) if value >= 0 else from_bits(~value & ((1 << stop) - 1))
