"""Batches of KV events: what vLLM and SGLang publish is read in every form, what nobody publishes is refused."""

from __future__ import annotations

import contextlib
import time
import tracemalloc
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.kv_events import (
    MAX_BLOCKS,
    MAX_EVENTS,
    MAX_PAYLOAD_BYTES,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventBatch,
    KvEventError,
    decode_batch,
    encode_batch,
    encode_extras,
)

VLLM_MAP = bytes.fromhex(
    "93cb3ff00000000000009288a474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573910bb1706172656e745f626c6f636b"
    "5f68617368c0a9746f6b656e5f696473920102aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3475055a96c6f72615f"
    "6e616d65c081a474797065b0416c6c426c6f636b73436c656172656400"
)
STORED = BlockStored((11,), None, (1, 2), 2, None, "GPU", None)


def pack(value: Any) -> bytes:
    return msgspec.msgpack.encode(value)


def stored(**fields: Any) -> dict[str, Any]:
    plain = {"type": "BlockStored", "block_hashes": [11], "parent_block_hash": None, "token_ids": [1, 2]}
    return plain | {"block_size": 2, "lora_id": None, "medium": "GPU", "lora_name": None} | fields


def test_vllms_bytes_are_read_and_are_what_is_written() -> None:
    batch = decode_batch(VLLM_MAP)
    assert batch == EventBatch(1.0, (STORED, AllBlocksCleared()), 0)
    assert encode_batch(batch) == VLLM_MAP


@pytest.mark.parametrize(
    "payload",
    [
        pack([1.0, [stored()]]),
        pack([1.0, [stored()], None]),
        pack([1.0, [stored(locality="LOCAL", ownership="a", lookahead_token_ids=[3], of_tomorrow={"x": [1]})]]),
        pack([1.0, [stored()], None, "of tomorrow"]),
        pack({"ts": 1.0, "events": [stored()]}),
        pack([1, [["BlockStored", [11], None, [1, 2], 2, None, "GPU", None]]]),
        pack([1.0, [["BlockStored", [11], None, [1, 2], 2, None, "GPU"]], None]),
    ],
    ids=["two", "three", "unknown keys", "four", "map", "positional", "positional without a lora name"],
)
def test_every_form_of_a_batch_says_the_same(payload: bytes) -> None:
    assert decode_batch(payload) == EventBatch(1.0, (STORED,))


def test_the_positional_form_of_old_sglang_has_no_medium() -> None:
    payload = pack([2.5, [["BlockStored", [-7], 3, [9], 1, None], ["BlockRemoved", [-7]], ["AllBlocksCleared"]]])
    expected = (BlockStored((-7,), 3, (9,), 1, None, None, None), BlockRemoved((-7,), None), AllBlocksCleared())
    assert decode_batch(payload) == EventBatch(2.5, expected)


def test_both_forms_of_events_may_come_in_one_batch() -> None:
    payload = pack([1.0, [{"type": "BlockRemoved", "block_hashes": [1], "medium": "CPU"}, ["BlockRemoved", [2]]]])
    assert decode_batch(payload).events == (BlockRemoved((1,), "CPU"), BlockRemoved((2,), None))


@pytest.mark.parametrize("name", ["data_parallel_rank", "attn_dp_rank"])
def test_a_rank_is_read_under_either_name_and_by_place(name: str) -> None:
    assert decode_batch(pack({"ts": 1.0, "events": [], name: 3})).data_parallel_rank == 3
    assert decode_batch(pack([1.0, [], 3])).data_parallel_rank == 3


@pytest.mark.parametrize("name", [0, -(1 << 63), (1 << 64) - 1, b"\x01", b"x" * 64])
def test_a_hash_is_64_bits_or_a_digest(name: int | bytes) -> None:
    event = decode_batch(pack([1.0, [stored(block_hashes=[name], parent_block_hash=name)]])).events[0]
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.parent_block_hash) == ((name,), name)


def test_groups_loras_and_salts_are_read() -> None:
    fields = {"group_idx": 5, "kv_cache_spec_kind": "sliding_window", "kv_cache_spec_sliding_window": 512}
    event = decode_batch(pack([1.0, [stored(**fields, lora_id=2, lora_name="law", cache_salt="t")]])).events[0]
    assert event == BlockStored((11,), None, (1, 2), 2, 2, "GPU", "law", msgspec.Raw(), *fields.values(), "t")


def test_extra_keys_are_texts_and_what_is_none_shows() -> None:
    event = decode_batch(pack([1.0, [stored(extra_keys=[["salt"], None, ["law", 7, ["image", 0]]])]])).events[0]
    assert isinstance(event, BlockStored)
    assert event.extras() == [["salt"], [], ["law", None, None]]
    assert b"extra_keys" not in encode_batch(EventBatch(1.0, (STORED,)))
    assert STORED.extras() == []


def test_written_extra_keys_are_read_back() -> None:
    event = BlockStored((1, 2), None, (1, 2), 1, None, "CPU", None, encode_extras([["salt"], []]))
    read = decode_batch(encode_batch(EventBatch(1.0, (event,)))).events[0]
    assert isinstance(read, BlockStored)
    assert read == event
    assert read.extras() == [["salt"], []]


def test_an_unknown_type_of_event_is_passed_over_and_counted() -> None:
    batch = decode_batch(pack([1.0, [{"type": "BlockTouched", "x": 1}, ["BlockTouched", 1], stored()]]))
    assert (batch.events, batch.unknown) == ((STORED,), 2)


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        (b"", "no batch"),
        (b"\xc1", "no batch"),
        (b"\x80", "no batch"),
        (VLLM_MAP[:-1], "no batch"),
        (VLLM_MAP[:-40], "no batch"),
        (VLLM_MAP + b"\x00", "no batch"),
        (pack(["now", []]), "no batch"),
        (pack([1.0, 5]), "no batch"),
        (pack([1.0, [stored(), 5]]), "event 1"),
        (pack([1.0, [[]]]), "event 0"),
        (pack([1.0, [{}]]), "event 0"),
        (pack([1.0, [{"type": "BlockStored"}]]), "block_hashes"),
        (pack([1.0, [stored(block_hashes=[""])]]), "block_hashes"),
        (pack([1.0, [stored(block_hashes=[b""])]]), "block_hashes"),
        (pack([1.0, [stored(block_hashes=[b"x" * 65])]]), "block_hashes"),
        (pack([1.0, [stored(token_ids=[-1])]]), "token_ids"),
        (pack([1.0, [stored(token_ids=[1 << 32])]]), "token_ids"),
        (pack([1.0, [stored(block_size=0)]]), "block_size"),
        (pack([1.0, [stored(medium="G" * 300)]]), "medium"),
        (pack([1.0, [["BlockRemoved", [1] * (MAX_BLOCKS + 1)]]]), "32768"),
        (pack([1.0, [["AllBlocksCleared"]] * (MAX_EVENTS + 1)]), "65536"),
        (bytes(MAX_PAYLOAD_BYTES + 1), "at most"),
    ],
)
def test_what_is_no_batch_is_refused_and_named(payload: bytes, says: str) -> None:
    with pytest.raises(KvEventError, match=says):
        decode_batch(payload)


def test_nesting_without_end_is_refused() -> None:
    head = b"\x92\xcb" + bytes(8)
    for deep in (b"\x91" * 100_000, head + b"\x91" * 100_000, head + b"\x91\x81\xa1x" + b"\x91" * 100_000):
        with pytest.raises(KvEventError):
            decode_batch(deep)


def test_nested_extra_keys_cost_nothing_until_asked_for_and_then_are_refused() -> None:
    nested = msgspec.Raw(b"\xdd" + (1 << 20).to_bytes(4, "big") + b"\x91\x90" * (1 << 20))
    payload = pack([1.0, [stored(extra_keys=nested)]])
    tracemalloc.start()
    event = decode_batch(payload).events[0]
    assert tracemalloc.get_traced_memory()[1] < 4 * len(payload)
    tracemalloc.stop()
    assert isinstance(event, BlockStored)
    with pytest.raises(KvEventError, match="extra_keys"):
        event.extras()


def test_a_count_that_the_bytes_do_not_hold_takes_neither_memory_nor_time() -> None:
    began = time.perf_counter()
    with pytest.raises(KvEventError):
        decode_batch(b"\x92\xcb" + bytes(8) + b"\xdd\x00\x00\xff\xff")
    with pytest.raises(KvEventError):
        decode_batch(pack([1.0, [msgspec.Raw(b"\x92\xacBlockRemoved\xdd\x00\x00\x7f\xff")]]))
    assert time.perf_counter() - began < 0.5


@given(st.binary(max_size=200))
def test_any_bytes_are_a_batch_or_refused(data: bytes) -> None:
    with contextlib.suppress(KvEventError):
        decode_batch(data)


@given(st.data())
def test_a_damaged_batch_is_a_batch_or_refused(data: st.DataObject) -> None:
    at = data.draw(st.integers(0, len(VLLM_MAP) - 1))
    damaged = VLLM_MAP[:at] + bytes([data.draw(st.integers(0, 255))]) + VLLM_MAP[at + 1 :]
    with contextlib.suppress(KvEventError):
        decode_batch(damaged)
