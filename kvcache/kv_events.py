"""What an engine says of its KV cache: batches of stored, removed and cleared blocks, in vLLM's msgpack.

A batch is an array ``[ts, events, data_parallel_rank?]`` (some versions: a map of these names), an event a map with
``"type"`` or, before vLLM 0.26 and in older SGLang, an array that begins with it. All of them are read, in any mixture;
unknown keys and unknown types of events are passed over.

Publishers number their batches: over ZMQ a batch is three frames, a topic, the number in 8 bytes big-endian, and this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import msgspec

MAX_PAYLOAD_BYTES = 4 << 20
MAX_EVENTS = 1 << 16
MAX_BLOCKS = 1 << 15
MAX_TOKENS = 1 << 21
MAX_HASH_BYTES = 64
MAX_NAME_CHARS = 256
MAX_EXTRAS = 8

BlockHash = int | bytes
"""An engine's name of a block: 64 bits, signed or not, or a digest."""

_Hash = int | Annotated[bytes, msgspec.Meta(min_length=1, max_length=MAX_HASH_BYTES)]
_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Name = Annotated[str, msgspec.Meta(max_length=MAX_NAME_CHARS)]
_Hashes = Annotated[tuple[_Hash, ...], msgspec.Meta(max_length=MAX_BLOCKS)]


NO_EXTRAS = msgspec.Raw()
"""This very object is left out when it is written."""


class KvEventError(ValueError):
    """A payload that is no batch of events; the text says where."""


class BlockStored(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Blocks that follow on ``parent_block_hash`` (None: they begin a prompt), each of ``block_size`` tokens.

    Of a group with a window, vLLM names only the last blocks that it kept, yet gives the tokens of the whole step; of a
    block that moved to another medium, it gives no tokens. ``extra_keys`` (see ``extras``) is what beyond the tokens
    went into each block's hash, such as a salt or an image; ``cache_salt`` is SGLang's word for the former.
    """

    block_hashes: _Hashes
    parent_block_hash: _Hash | None
    token_ids: Annotated[tuple[_Token, ...], msgspec.Meta(max_length=MAX_TOKENS)]
    block_size: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    lora_id: int | _Name | None
    medium: _Name | None
    lora_name: _Name | None
    extra_keys: msgspec.Raw = NO_EXTRAS
    group_idx: int | None = None
    kv_cache_spec_kind: _Name | None = None
    kv_cache_spec_sliding_window: int | None = None
    cache_salt: _Name | None = None

    def extras(self) -> list[list[str | None]]:
        """For each block what went into its hash beyond its tokens; None stands for what is no text.

        Empty where the publisher said nothing. Raises KvEventError.
        """
        if not bytes(self.extra_keys):
            return []
        try:
            found = _extras.decode(self.extra_keys)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise KvEventError(f"extra_keys: {error}") from error
        return [[_text(part) for part in parts or ()] for parts in found or ()]


class BlockRemoved(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Blocks that are gone from ``medium``; None: from wherever they were."""

    block_hashes: _Hashes
    medium: _Name | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Nothing is held any more."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True, slots=True)
class EventBatch:
    """Events of one moment (``ts``: Unix seconds). ``unknown`` counts those of types that are not known here."""

    ts: float
    events: tuple[KvEvent, ...]
    data_parallel_rank: int | None = None
    unknown: int = 0


# Fields that the publisher may leave out: older ones did not have them, and all leave out what is at its default.


class _StoredMap(BlockStored, frozen=True, tag="BlockStored"):
    lora_id: int | _Name | None = None
    medium: _Name | None = None
    lora_name: _Name | None = None


class _RemovedMap(BlockRemoved, frozen=True, tag="BlockRemoved"):
    medium: _Name | None = None


class _StoredArray(BlockStored, frozen=True, array_like=True, tag="BlockStored"):
    lora_id: int | _Name | None = None
    medium: _Name | None = None
    lora_name: _Name | None = None


class _RemovedArray(BlockRemoved, frozen=True, array_like=True, tag="BlockRemoved"):
    medium: _Name | None = None


class _ClearedArray(AllBlocksCleared, frozen=True, array_like=True, tag="AllBlocksCleared"):
    pass


class _BatchOut(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: tuple[KvEvent, ...]
    data_parallel_rank: int | None = None


class _BatchArray(msgspec.Struct, frozen=True, array_like=True):
    ts: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_EVENTS)]
    data_parallel_rank: int | None = None


class _BatchMap(msgspec.Struct, frozen=True):
    ts: float
    events: Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_EVENTS)]
    data_parallel_rank: int | None = None
    attn_dp_rank: int | None = None


class _TagMap(msgspec.Struct, frozen=True):
    type: str


class _TagArray(msgspec.Struct, frozen=True, array_like=True):
    type: str


_Parts = Annotated[list[msgspec.Raw], msgspec.Meta(max_length=MAX_EXTRAS)]

_encoder = msgspec.msgpack.Encoder()
_extras = msgspec.msgpack.Decoder(Annotated[list[_Parts | None], msgspec.Meta(max_length=MAX_BLOCKS)] | None)
_name = msgspec.msgpack.Decoder(_Name)
_batch_array = msgspec.msgpack.Decoder(_BatchArray)
_batch_map = msgspec.msgpack.Decoder(_BatchMap)
_event_map: msgspec.msgpack.Decoder[KvEvent] = msgspec.msgpack.Decoder(_StoredMap | _RemovedMap | AllBlocksCleared)
_event_array: msgspec.msgpack.Decoder[KvEvent] = msgspec.msgpack.Decoder(_StoredArray | _RemovedArray | _ClearedArray)
_tag_map = msgspec.msgpack.Decoder(_TagMap)
_tag_array = msgspec.msgpack.Decoder(_TagArray)
_TYPES = frozenset({"BlockStored", "BlockRemoved", "AllBlocksCleared"})


def encode_extras(extras: Sequence[Sequence[str]]) -> msgspec.Raw:
    """The ``extra_keys`` of blocks; an empty entry says that nothing beyond its tokens went into that block's hash."""
    return msgspec.Raw(_encoder.encode([list(parts) or None for parts in extras]))


def encode_batch(batch: EventBatch) -> bytes:
    """A batch as vLLM publishes it: an array of three, its events maps."""
    return _encoder.encode(_BatchOut(batch.ts, batch.events, batch.data_parallel_rank))


def decode_batch(payload: bytes) -> EventBatch:
    """Read a batch of any of the forms. Raises KvEventError, also for one beyond the bounds above."""
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise KvEventError(f"a batch of {len(payload)} bytes; at most {MAX_PAYLOAD_BYTES} are read")
    try:
        if _is_map(payload):
            outer = _batch_map.decode(payload)
            rank = outer.data_parallel_rank if outer.data_parallel_rank is not None else outer.attn_dp_rank
            ts, raw_events = outer.ts, outer.events
        else:
            plain = _batch_array.decode(payload)
            ts, raw_events, rank = plain.ts, plain.events, plain.data_parallel_rank
    except (msgspec.MsgspecError, RecursionError) as error:
        raise KvEventError(f"no batch of events: {error}") from error
    events = [event for at, raw in enumerate(raw_events) if (event := _event(at, bytes(raw))) is not None]
    return EventBatch(ts, tuple(events), rank, len(raw_events) - len(events))


def _event(at: int, data: bytes) -> KvEvent | None:
    """One event; None for a type that is not known."""
    mapped = _is_map(data)
    try:
        found = (_event_map if mapped else _event_array).decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        if isinstance(error, msgspec.ValidationError) and _unknown(data, mapped):
            return None
        raise KvEventError(f"event {at}: {error}") from error
    if isinstance(found, BlockStored):
        return BlockStored(*msgspec.structs.astuple(found))
    return BlockRemoved(*msgspec.structs.astuple(found)) if isinstance(found, BlockRemoved) else AllBlocksCleared()


def _text(raw: msgspec.Raw) -> str | None:
    try:
        return _name.decode(raw)
    except (msgspec.MsgspecError, RecursionError):
        return None


def _unknown(data: bytes, mapped: bool) -> bool:
    try:
        return (_tag_map if mapped else _tag_array).decode(data).type not in _TYPES
    except (msgspec.MsgspecError, RecursionError):
        return False


def _is_map(data: bytes) -> bool:
    """Whether msgpack bytes begin a map: fixmap, map 16 or map 32."""
    return data[:1] in (b"\xde", b"\xdf") or (len(data) > 0 and data[0] & 0xF0 == 0x80)
