"""Names of prompt blocks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.hashing import block_hashes

IDS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def names(ids: list[int], block: int = 4, **changed: object) -> list[bytes]:
    return block_hashes(ids, block, **{"fingerprint": "f", "salt": "s", **changed})  # type: ignore[arg-type]


@given(IDS, st.integers(1, 9))
def test_only_full_blocks_have_names_and_all_differ(ids: list[int], block: int) -> None:
    hashes = names(ids, block)
    assert len(hashes) == len(ids) // block
    assert len(set(hashes)) == len(hashes)
    assert all(len(name) == 16 for name in hashes)


@given(IDS, IDS)
def test_a_common_prefix_has_common_names_and_only_it(prefix: list[int], rest: list[int]) -> None:
    whole, part = names(prefix + rest), names(prefix)
    assert whole[: len(part)] == part


@given(st.lists(st.integers(0, 2**32 - 2), min_size=12, max_size=12), st.integers(0, 11))
def test_a_changed_token_renames_its_block_and_all_after_it(ids: list[int], at: int) -> None:
    other = [*ids[:at], ids[at] + 1, *ids[at + 1 :]]
    same = [a == b for a, b in zip(names(ids), names(other), strict=True)]
    assert same == [n < at // 4 for n in range(3)]


@pytest.mark.parametrize(
    "changed",
    [{"fingerprint": "g"}, {"salt": "t"}, {"lora": "l"}, {"extras": (b"image",)}, {"fingerprint": "fs", "salt": ""}],
)
def test_models_tenants_loras_and_extras_share_no_name(changed: dict[str, object]) -> None:
    ids = list(range(16))
    assert not set(names(ids)) & set(names(ids, **changed))


def test_names_are_stable_across_versions() -> None:
    assert [name.hex() for name in names([1, 2, 3, 4, 5, 6, 7, 8])] == [
        "36ed5a9e7b33ac38230f9a1c7152daf7",
        "71c2e67ae1f91a8eaade78aef29c37b2",
    ]


@pytest.mark.parametrize("bad", [-1, 2**32])
def test_an_id_outside_32_bits_is_refused(bad: int) -> None:
    with pytest.raises(ValueError, match="token_ids"):
        names([1, bad])


def test_a_block_holds_at_least_one_token() -> None:
    with pytest.raises(ValueError, match="block_tokens must be at least 1"):
        names([1], 0)
