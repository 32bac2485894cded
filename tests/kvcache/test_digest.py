"""Digests of pieces and of whole transfers."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.digest import DIGEST_BYTES, kv_digest, piece_digest, wire_digest


def test_the_digest_of_nothing_is_xxh3s_published_value() -> None:
    assert piece_digest([]).hex() == "99aa06d3014798d86001c324468d497f"


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=5))
def test_a_digest_does_not_depend_on_how_the_bytes_are_split(data: bytes, cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    assert piece_digest([memoryview(data)[a:b] for a, b in pairwise(bounds)]) == piece_digest([data])


@given(st.binary(min_size=1, max_size=300), st.data())
def test_one_flipped_bit_changes_the_digest(data: bytes, draw: st.DataObject) -> None:
    damaged = bytearray(data)
    damaged[draw.draw(st.integers(0, len(data) - 1))] ^= 1 << draw.draw(st.integers(0, 7))
    assert piece_digest([damaged]) != piece_digest([data])


def test_a_kv_digest_depends_on_every_piece_and_their_order() -> None:
    a, b = piece_digest([b"a"]), piece_digest([b"b"])
    assert len({kv_digest(a + b), kv_digest(b + a), kv_digest(a), kv_digest(b"")}) == 4
    assert len(kv_digest(a)) == DIGEST_BYTES


def test_a_broken_list_of_digests_is_refused() -> None:
    with pytest.raises(ValueError, match="17 bytes are no multiple of 16"):
        kv_digest(bytes(17))


def test_the_wire_carries_the_digest_of_what_both_ends_can_see() -> None:
    raw, encoded = [b"raw"], [b"enc", b"oded"]
    assert wire_digest(True, raw, encoded) == piece_digest(raw)
    assert wire_digest(False, raw, encoded) == piece_digest([b"encoded"])
