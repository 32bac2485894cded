"""Frames survive any split of the stream; anything else is a WireError, found before memory is taken for it."""

from __future__ import annotations

import contextlib
import os
import random
import tracemalloc
from collections.abc import Iterable, Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvcache.framing import SCRATCH_BYTES, FrameParser
from kvcache.wire import (
    HEADER_BYTES,
    MAX_CONTROL_BODY,
    Abort,
    Ack,
    Announce,
    Data,
    Frame,
    Grant,
    Hello,
    Kind,
    Lane,
    Manifest,
    Open,
    Ping,
    Pong,
    Proof,
    Role,
    WireError,
    encode_frame,
    header,
    type_of_kind,
)

FUZZ_FRAMES = int(os.environ.get("PRFAAS_FUZZ_FRAMES", "20000"))

T = bytes(range(16))


def data_frame(seq: int = 0, wire_bytes: int = 5) -> Data:
    return Data(T, seq, 1, 2, 0, 256, 512, "bfloat16", "raw", 5, wire_bytes, b"\xaa" * 16)


GOLDEN: list[tuple[Frame, str]] = [
    (
        Hello(1, 1, "n", "i", Role.DECODE, b"\x01" * 2, b"\x02" * 2, "fp"),
        "0000001301010000980101a16ea16902c4020101c4020202a26670",
    ),
    (Proof(b"\x05" * 3), "000000060102000091c403050505"),
    (Open(b"tk", ("raw", "lossless"), 3, 9), "00000015010300 0094c402746b92a3726177a86c6f73736c6573730309"),
    (Announce(T, 4, 1000, "raw"), "0000001b0104000094c410000102030405060708090a0b0c0d0e0f04cd03e8a3726177"),
    (Grant(T, (2, 300)), "000000180105000092c410000102030405060708090a0b0c0d0e0f9202cd012c"),
    (
        data_frame(),
        "000000430106003e 9cc410000102030405060708090a0b0c0d0e0f00010200cd0100cd0200a862666c6f61743136a3726177"
        "0505c410aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    ),
    (
        Manifest(T, b"\x07" * 2, 0.5, False, "tcp", ("shm",), 300),
        "0000002d0107000097c410000102030405060708090a0b0c0d0e0fc4020707cb3fe0000000000000c2a374637091a373686dcd012c",
    ),
    (Ack(T, 300, True), "000000170108000093c410000102030405060708090a0b0c0d0e0fcd012cc3"),
    (Abort(T, "why", "x"), "000000190109000093c410000102030405060708090a0b0c0d0e0fa3776879a178"),
    (Ping(7), "00000004010a00009207c400"),
    (Ping(1 << 48, b"\x00" * 3), "0000000f010a0000 92cf0001000000000000c403000000"),
    (Pong(7), "00000002010b00009107"),
    (Lane("rdma", b"\x01\x02"), "0000000a010c000092a472646d61c4020102"),
]


class Sink:
    """Payload memory in two unequal views for each Data frame, and what was asked for."""

    def __init__(self) -> None:
        self.memory: dict[int, bytearray] = {}

    def __call__(self, data: Data) -> Sequence[memoryview]:
        room = memoryview(bytearray(data.wire_bytes))
        self.memory[data.seq] = room.obj  # type: ignore[assignment]
        cut = data.wire_bytes // 3
        return [room[:cut], room[cut:]]


def feed(parser: FrameParser, stream: bytes, cuts: Iterable[int] = ()) -> list[Frame]:
    """Give ``stream`` to the parser in reads that never cross ``cuts``; the frames that came out."""
    frames: list[Frame] = []
    edges = sorted({c for c in cuts if 0 < c < len(stream)} | {len(stream)})
    at = 0
    while at < len(stream):
        while (frame := parser.next_frame()) is not None:
            frames.append(frame)
        edge = next(e for e in edges if e > at)
        count = 0
        for buffer in parser.get_buffers():
            part = stream[at : min(edge, at + len(buffer))]
            buffer[: len(part)] = part
            at += len(part)
            count += len(part)
            if at == edge:
                break
        parser.buffer_updated(count)
    while (frame := parser.next_frame()) is not None:
        frames.append(frame)
    return frames


def established(target: object = None) -> FrameParser:
    parser = FrameParser(target) if target is not None else FrameParser()  # type: ignore[arg-type]
    parser.establish()
    return parser


def raw_frame(kind: Kind, body: bytes, version: int = 1, head: int = 0, length: int | None = None) -> bytes:
    return header.pack(len(body) if length is None else length, version, kind, head) + body


@pytest.mark.parametrize(("frame", "golden"), GOLDEN, ids=lambda v: type(v).__name__ if not isinstance(v, str) else "")
def test_every_frame_has_its_golden_bytes_and_reads_back_from_them(frame: Frame, golden: str) -> None:
    golden_bytes = bytes.fromhex(golden)
    assert encode_frame(frame) == golden_bytes
    parser = FrameParser() if isinstance(frame, Hello | Proof) else established(Sink())
    assert feed(parser, golden_bytes + (b"pppp!" if isinstance(frame, Data) else b"")) == [frame]


def test_a_manifest_that_does_not_say_what_carried_it_came_by_tcp() -> None:
    old = bytes.fromhex("000000210107000094c410000102030405060708090a0b0c0d0e0fc4020707cb3fe0000000000000c2")
    assert feed(established(Sink()), old) == [Manifest(T, b"\x07" * 2, 0.5, False, "tcp", (), 0)]


def test_the_golden_list_holds_every_kind() -> None:
    assert {type(frame) for frame, _ in GOLDEN} == set(type_of_kind.values())


def stream_of(payloads: Sequence[bytes]) -> tuple[bytes, list[Frame]]:
    """Data frames with small and large control frames between them."""
    stream, frames = b"", list[Frame]()
    for seq, payload in enumerate(payloads):
        for frame in (data_frame(seq, len(payload)), Ack(T, seq), Manifest(T, bytes(16) * (seq * 600), 0.0)):
            frames.append(frame)
            stream += encode_frame(frame) + (payload if isinstance(frame, Data) else b"")
    return stream, frames


@given(
    st.lists(st.integers(0, 40_000), min_size=1, max_size=5),
    st.lists(st.integers(0, 250_000), max_size=40),
    st.integers(0, 2**32),
)
def test_payloads_land_in_their_target_whatever_the_split(sizes: list[int], cuts: list[int], seed: int) -> None:
    payloads = [random.Random(seed + n).randbytes(size) for n, size in enumerate(sizes)]
    stream, frames = stream_of(payloads)
    sink = Sink()
    assert feed(established(sink), stream, cuts) == frames
    assert [bytes(sink.memory[n]) for n in range(len(sizes))] == payloads


def test_a_stream_split_into_single_bytes_reads_the_same() -> None:
    stream, frames = stream_of([b"abc", b""])
    assert feed(established(Sink()), stream, range(len(stream))) == frames


def test_a_payload_is_read_directly_into_its_target() -> None:
    room = memoryview(bytearray(100_000))
    parser = established(lambda data: [room])
    assert feed(parser, encode_frame(data_frame(0, len(room)))) == []
    parser.get_buffers()[0][:3] = b"xyz"
    assert bytes(room[:3]) == b"xyz"


@pytest.mark.parametrize(
    ("stream", "field"),
    [
        (header.pack(1 << 31, 1, Kind.ACK, 0), "length"),
        (header.pack(MAX_CONTROL_BODY + 1, 1, Kind.OPEN, 0), "length"),
        (header.pack(0, 1, Kind.ACK, 0), "length"),
        (header.pack(0xFFFFFFFF, 1, Kind.DATA, 60), "length"),
        (header.pack(5000, 1, Kind.DATA, 4097), "head"),
        (header.pack(50, 1, Kind.DATA, 60), "head"),
        (header.pack(50, 1, Kind.DATA, 0), "head"),
        (header.pack(2, 1, Kind.PING, 2), "head"),
        (header.pack(2, 1, 13, 0), "kind"),
        (header.pack(2, 1, 0, 0), "kind"),
        (header.pack(2, 0, Kind.PING, 0), "version"),
        (header.pack(2, 2, Kind.PING, 0), "version"),
        (header.pack(20, 1, Kind.HELLO, 0), "kind"),
        (raw_frame(Kind.ACK, b"\xc1"), "body"),
        (raw_frame(Kind.ACK, b"\x91\x01"), "body"),
        (raw_frame(Kind.PING, b"\x91\x01\x00"), "body"),
        (raw_frame(Kind.ABORT, b"\x92\xc4\x00\xa1\xff"), "body"),
        (raw_frame(Kind.PING, b"\x92\x01" + b"\x91" * 90_000), "body"),
        (encode_frame(data_frame(0, 5)).replace(b"\x00\x43", b"\x00\x44", 1) + b"......", "wire_bytes"),
    ],
)
def test_a_frame_that_breaks_a_bound_is_refused_and_the_field_is_named(stream: bytes, field: str) -> None:
    with pytest.raises(WireError) as caught:
        feed(established(Sink()), stream)
    assert caught.value.field == field


@pytest.mark.parametrize(
    "stream",
    [
        header.pack(1 << 31, 1, Kind.MANIFEST, 0),
        header.pack(0xFFFFFFFF, 1, Kind.DATA, 100),
        raw_frame(Kind.OPEN, b"\x92\xc4\x00\xdd\xff\xff\xff\xff\xa1a"),
        raw_frame(Kind.OPEN, b"\x92\xc6\xff\xff\xff\xff\xa1a"),
    ],
)
def test_no_memory_is_taken_for_what_a_header_merely_claims(stream: bytes) -> None:
    parser = established()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    tracemalloc.reset_peak()
    try:
        with pytest.raises(WireError):
            feed(parser, stream)
        assert tracemalloc.get_traced_memory()[1] - before < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", [k for k in Kind if k not in (Kind.HELLO, Kind.PROOF, Kind.ABORT)])
def test_before_the_handshakes_end_only_its_frames_are_read(kind: Kind) -> None:
    with pytest.raises(WireError, match="before the handshake"):
        feed(FrameParser(), header.pack(100, 1, kind, 50 if kind is Kind.DATA else 0))


def test_a_stranger_may_send_no_more_than_a_small_hello() -> None:
    with pytest.raises(WireError, match="4096"):
        feed(FrameParser(), header.pack(5000, 1, Kind.HELLO, 0))


def test_a_newer_peers_appended_fields_are_passed_over() -> None:
    body = msgspec.msgpack.encode([T, 3, True, {"later": [1, 2]}, "more"])
    assert feed(established(), raw_frame(Kind.ACK, body)) == [Ack(T, 3, True)]


def test_an_older_peers_shorter_frames_get_the_defaults() -> None:
    stream = raw_frame(Kind.ACK, msgspec.msgpack.encode([T, 3]))
    stream += raw_frame(Kind.OPEN, msgspec.msgpack.encode([b"t", ["raw"]]))
    stream += raw_frame(Kind.ABORT, msgspec.msgpack.encode([T, "why"]))
    stream += raw_frame(Kind.PING, msgspec.msgpack.encode([7]))
    assert feed(established(), stream) == [Ack(T, 3), Open(b"t", ("raw",)), Abort(T, "why"), Ping(7)]


def test_an_older_peer_passes_over_the_padding_of_a_ping() -> None:
    class OlderPing(msgspec.Struct, array_like=True):
        token: int

    body = encode_frame(Ping(7, bytes(16 << 10)))[HEADER_BYTES:]
    assert msgspec.msgpack.decode(body, type=OlderPing) == OlderPing(7)


def test_versions_n_and_n_minus_1_are_read_and_no_others() -> None:
    for version in (2, 3):
        parser = FrameParser(oldest_version=2, newest_version=3)
        parser.establish()
        assert feed(parser, encode_frame(Ping(1), version)) == [Ping(1)]
    for version in (1, 4):
        parser = FrameParser(oldest_version=2, newest_version=3)
        parser.establish()
        with pytest.raises(WireError, match="version"):
            feed(parser, encode_frame(Ping(1), version))


def test_the_hello_body_is_kept_as_it_was_sent() -> None:
    body = msgspec.msgpack.encode([1, 1, "n", "i", 1, b"k", b"x", "fp", "from the future"])
    parser = FrameParser()
    (frame,) = feed(parser, raw_frame(Kind.HELLO, body))
    assert isinstance(frame, Hello)
    assert parser.hello_body == body


def test_a_payload_without_a_target_is_dropped_and_its_frame_is_not_returned() -> None:
    stream = encode_frame(data_frame(0, 70_000)) + bytes(70_000) + encode_frame(Ping(1))
    assert feed(established(), stream, [10, 100, 30_000]) == [Ping(1)]


def test_a_target_that_raises_loses_its_payload_and_the_stream_goes_on() -> None:
    def target(data: Data) -> None:
        raise LookupError(data.seq)

    parser = established(target)
    with pytest.raises(LookupError):
        feed(parser, encode_frame(data_frame(3, 5)))
    assert feed(parser, b"12345" + encode_frame(Ping(1))) == [Ping(1)]


def test_memory_taken_back_in_mid_payload_is_not_written_again() -> None:
    room = bytearray(50_000)
    parser = established(lambda data: [memoryview(room)])
    assert feed(parser, encode_frame(data_frame(0, 50_000)) + b"a" * 20_000) == []
    assert parser.receiving is not None
    parser.discard_payload()
    assert feed(parser, b"b" * 30_000 + encode_frame(Ping(1))) == [Ping(1)]
    assert parser.receiving is None
    assert room == b"a" * 20_000 + bytes(30_000)


@pytest.mark.parametrize("size", [4, 6])
def test_a_target_of_another_size_is_a_mistake_of_the_caller(size: int) -> None:
    with pytest.raises(ValueError, match="target"):
        feed(established(lambda data: [memoryview(bytearray(size))]), encode_frame(data_frame(0, 5)) + b"12345")


def test_a_frame_too_large_to_be_read_is_not_sent() -> None:
    with pytest.raises(ValueError, match="Manifest of"):
        encode_frame(Manifest(T, bytes(MAX_CONTROL_BODY), 0.0))
    with pytest.raises(ValueError, match="Data header"):
        encode_frame(Data(T, 0, 0, 0, 0, 0, 0, "x" * 5000, "raw", 1, 1, b""))
    with pytest.raises(ValueError, match="wire_bytes"):
        encode_frame(data_frame(0, 1 << 31))


def mutate(rng: random.Random, stream: bytearray) -> None:
    """Damage ``stream`` in one of the ways that bytes get damaged, or that an attacker would choose."""
    at = rng.randrange(len(stream))
    way = rng.randrange(7)
    if way == 0:
        stream[at] ^= 1 << rng.randrange(8)
    elif way == 1:
        stream[at] = rng.choice((0, 1, 0x7F, 0x80, 0xC1, 0xDD, 0xDF, 0xFF))
    elif way == 2:
        del stream[max(1, at) : at + rng.randrange(1, 9)]
    elif way == 3:
        stream[at:at] = rng.randbytes(rng.randrange(1, 9))
    elif way == 4:
        end = min(len(stream), at + rng.randrange(1, 64))
        stream[at:at] = stream[at:end]
    elif way == 5:
        del stream[max(1, at) :]
    else:
        stream[at : at + 4] = rng.choice((0, 1, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 20)).to_bytes(4, "big")


def test_mutated_frames_end_in_frames_or_a_wire_error_and_in_bounded_memory() -> None:
    """20,000 frames by default; PRFAAS_FUZZ_FRAMES=1000000 for the long run."""
    rng = random.Random(20260801)
    room = memoryview(bytearray(4096))
    bound = SCRATCH_BYTES + MAX_CONTROL_BODY + len(room)

    def target(data: Data) -> Sequence[memoryview] | None:
        return [room[: data.wire_bytes]] if data.wire_bytes <= len(room) else None

    frames = [frame for frame, _ in GOLDEN] + [data_frame(1, 3000), Manifest(T, bytes(20_000), 1.0)]
    encoded = [encode_frame(f) + (bytes(f.wire_bytes) if isinstance(f, Data) else b"") for f in frames]
    handshake = [n for n, f in enumerate(frames) if isinstance(f, Hello | Proof | Abort)]
    others = [n for n, f in enumerate(frames) if not isinstance(f, Hello | Proof)]
    done = refused = 0
    while done < FUZZ_FRAMES:
        begun = rng.random() < 0.2
        chosen = [rng.choice(handshake if begun else others) for _ in range(rng.randrange(1, 5))]
        done += len(chosen)
        stream = bytearray(b"".join(encoded[n] for n in chosen))
        for _ in range(rng.randrange(1, 4)):
            mutate(rng, stream)
        parser = FrameParser(target)
        if not begun:
            parser.establish()
        cuts = [rng.randrange(len(stream) + 1) for _ in range(rng.randrange(4))]
        try:
            came = feed(parser, bytes(stream), cuts)
        except WireError:
            refused += 1
        else:
            assert len(came) <= len(stream) // 9 + 1
            assert sum(map(len, parser.get_buffers())) <= bound
    assert refused > FUZZ_FRAMES // 20


@given(st.binary(min_size=1, max_size=300), st.booleans())
def test_arbitrary_bytes_end_in_frames_or_a_wire_error(stream: bytes, begun: bool) -> None:
    parser = FrameParser()
    if not begun:
        parser.establish()
    with contextlib.suppress(WireError):
        feed(parser, stream)
