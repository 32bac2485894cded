"""Control messages: what the two sides say, and what is no message."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.control import (
    Beat,
    Cancel,
    ChangeRole,
    CodecWork,
    ControlError,
    FromNode,
    Heartbeat,
    Join,
    KvAddress,
    KvEvents,
    KvSource,
    LinkReport,
    ModelInfo,
    PrefillJob,
    ReplayKvEvents,
    RoleChanged,
    SharePrefix,
    TakePrefix,
    ToNode,
    Welcome,
    decode_from_node,
    decode_to_node,
    encode,
)
from kvcache.wire import Role

FROM_NODE: list[FromNode] = [
    Join(
        node_id="n",
        incarnation="i",
        cluster="c",
        role=Role.PREFILL,
        public_key=bytes(32),
        kv_address=KvAddress("h", 1),
        model=ModelInfo("m", {"weights": "w"}, 100, 256, 512),
        version="1",
        max_queue=3,
        codecs=(CodecWork("raw", 1, 1, 0.5),),
        encoders=2,
    ),
    Heartbeat(True, 1, 2, 3, 4, 5, 0.5, 0.25, 6, "", (LinkReport("p", 0.03, 1e9, 1, 2, 3),), (CodecWork("int8"),)),
    KvEvents(7, b"batch"),
    RoleChanged(4, Role.DECODE, False, "busy", "why"),
]
TO_NODE: list[ToNode] = [
    Welcome(bytes(32), 1.0, 3.5),
    Beat(),
    Cancel("j"),
    PrefillJob(b"t", (1, 2, 3), "raw"),
    SharePrefix(b"t", (1, 2, 3), "raw", salt="s"),
    TakePrefix(KvSource(b"t", "n", "i", bytes(32), None), (1, 2, 3)),
    ReplayKvEvents(7),
    ChangeRole(Role.PREFILL, 4, "i", 2.5),
]


@pytest.mark.parametrize("message", FROM_NODE, ids=lambda message: type(message).__name__)
def test_a_nodes_message_is_read_back_whole_and_only_by_a_gateway(message: FromNode) -> None:
    assert decode_from_node(encode(message)) == message
    with pytest.raises(ControlError):
        decode_to_node(encode(message))


@pytest.mark.parametrize("message", TO_NODE, ids=lambda message: type(message).__name__)
def test_a_gateways_message_is_read_back_whole_and_only_by_a_node(message: ToNode) -> None:
    assert decode_to_node(encode(message)) == message
    with pytest.raises(ControlError):
        decode_from_node(encode(message))


def test_fields_of_a_neighbouring_version_are_ignored() -> None:
    assert decode_to_node(msgspec.msgpack.encode({"type": "Cancel", "job": "j", "new": [1]})) == Cancel("j")


@given(st.binary(max_size=200))
def test_rubbish_is_a_control_error_and_nothing_else(data: bytes) -> None:
    for decode in (decode_from_node, decode_to_node):
        with pytest.raises(ControlError):
            decode(data)


def test_a_message_nested_too_deeply_is_a_control_error() -> None:
    data = b"\x82\xa4type\xa4Beat\xa1x" + b"\x91" * 100_000 + b"\xc0"
    for decode in (decode_from_node, decode_to_node):
        with pytest.raises(ControlError):
            decode(data)
