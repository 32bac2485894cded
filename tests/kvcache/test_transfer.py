"""A transfer accepts exactly its plan: any other frame is a violation that names the field."""

from __future__ import annotations

import random

import msgspec
import pytest

from kvcache.digest import kv_digest, piece_digest
from kvcache.layout import DType, GroupKind, GroupSpec, KVLayout, LayerSpec, TensorSpec
from kvcache.plan import plan_transfer
from kvcache.ticket import Ticket
from kvcache.transfer import IncomingTransfer, OutgoingTransfer, TransferViolation
from kvcache.wire import Ack, Announce, Data, Grant, Manifest

T = b"t" * 16
LAYOUT = KVLayout(
    (
        GroupSpec(GroupKind.FULL, (LayerSpec(0, (TensorSpec("k", DType.BFLOAT16, (2, 4)),)),)),
        GroupSpec(GroupKind.SLIDING, (LayerSpec(1, (TensorSpec("k", DType.BFLOAT16, (1, 4)),)),), 16),
        GroupSpec(GroupKind.STATE, (LayerSpec(2, (TensorSpec("s", DType.FLOAT32, (3,)),)),)),
    )
)
PLAN = plan_transfer(LAYOUT, 4, 40, 16)


def ticket(**changes: object) -> Ticket:
    made = Ticket(T, "r", 0, "p", "p-1", b"k" * 32, "fp", 4, 40, 16, PLAN.nbytes, 0.0, 60.0)
    return msgspec.structs.replace(made, **changes)


def payload(seq: int) -> bytes:
    return random.Random(seq).randbytes(PLAN.pieces[seq].nbytes)


def headers(out: OutgoingTransfer) -> list[Data]:
    return [out.header(p, "raw", p.nbytes, piece_digest([payload(p.seq)])) for p in PLAN.pieces]


def announced() -> IncomingTransfer:
    incoming = IncomingTransfer(PLAN, ticket(), ("raw",))
    incoming.check_announce(OutgoingTransfer(PLAN, ticket()).announce("raw"))
    return incoming


def test_a_whole_transfer_ends_in_the_digest_of_all_its_pieces() -> None:
    out, incoming = OutgoingTransfer(PLAN, ticket()), announced()
    digests = b""
    for data, piece in zip(headers(out), PLAN.pieces, strict=True):
        assert incoming.check_data(data) == piece
        incoming.arrived(piece.seq)
        digest = piece_digest([payload(piece.seq)])
        incoming.verified(piece.seq, digest)
        assert incoming.next_seq == piece.seq + 1
        digests += digest
    assert incoming.finish(out.manifest(0.5)) == kv_digest(digests)
    out.on_ack(Ack(T, incoming.next_seq, committed=True))
    assert out.committed
    assert out.acked_seq == len(PLAN.pieces)
    assert incoming.wire_bytes == out.wire_bytes == PLAN.nbytes


def test_next_seq_waits_for_the_gaps_that_threads_leave() -> None:
    incoming = announced()
    for data in headers(OutgoingTransfer(PLAN, ticket()))[:3]:
        incoming.check_data(data)
        incoming.arrived(data.seq)
    incoming.verified(2, piece_digest([payload(2)]))
    incoming.verified(1, piece_digest([payload(1)]))
    assert incoming.next_seq == 0
    incoming.verified(0, piece_digest([payload(0)]))
    assert incoming.next_seq == 3


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("transfer", b"u" * 16),
        ("seq", -1),
        ("seq", 1 << 60),
        ("group", 1),
        ("layer", 1),
        ("tensor", 1),
        ("start", 3),
        ("stop", 17),
        ("dtype", "float16"),
        ("codec", "lossless"),
        ("raw_bytes", 1),
        ("wire_bytes", 0),
        ("wire_bytes", -1),
        ("wire_bytes", PLAN.pieces[0].nbytes + 1),
        ("digest", b"short"),
    ],
)
def test_a_header_that_differs_from_the_plan_in_one_field_is_a_violation(field: str, value: object) -> None:
    good = headers(OutgoingTransfer(PLAN, ticket()))[0]
    incoming = announced()
    with pytest.raises(TransferViolation) as caught:
        incoming.check_data(msgspec.structs.replace(good, **{field: value}))
    assert caught.value.field == field
    assert incoming.check_data(good) == PLAN.pieces[0]


def test_pieces_come_in_any_order_and_again_only_with_the_same_digest() -> None:
    first, second, third = headers(OutgoingTransfer(PLAN, ticket()))[:3]
    incoming = announced()
    for data in (third, first, third):
        assert incoming.check_data(data) == PLAN.pieces[data.seq]
    incoming.arrived(2)
    assert incoming.check_data(third) is None
    assert incoming.check_data(first) == PLAN.pieces[0]
    for data in (first, third):
        with pytest.raises(TransferViolation, match="digest"):
            incoming.check_data(msgspec.structs.replace(data, digest=second.digest))
    assert incoming.wire_bytes == first.wire_bytes + third.wire_bytes


def test_a_piece_may_be_sent_again_as_it_was_but_not_otherwise() -> None:
    out = OutgoingTransfer(PLAN, ticket())
    first = headers(out)[0]
    assert out.header(PLAN.pieces[0], "raw", first.wire_bytes, first.digest) == first
    assert (out.sent, out.wire_bytes) == (len(PLAN.pieces), PLAN.nbytes)
    with pytest.raises(ValueError, match="not what it was"):
        out.header(PLAN.pieces[0], "raw", first.wire_bytes, bytes(16))


def test_a_piece_beyond_the_last_is_a_violation() -> None:
    all_headers = headers(OutgoingTransfer(PLAN, ticket()))
    incoming = announced()
    for data in all_headers:
        incoming.check_data(data)
    with pytest.raises(TransferViolation, match="plan ends"):
        incoming.check_data(msgspec.structs.replace(all_headers[-1], seq=len(all_headers)))


def test_data_before_the_announce_is_a_violation() -> None:
    with pytest.raises(TransferViolation, match="before the Announce"):
        IncomingTransfer(PLAN, ticket(), ("raw",)).check_data(headers(OutgoingTransfer(PLAN, ticket()))[0])


@pytest.mark.parametrize(
    ("announce", "field"),
    [
        (Announce(b"u" * 16, len(PLAN.pieces), PLAN.nbytes, "raw"), "transfer"),
        (Announce(T, len(PLAN.pieces) - 1, PLAN.nbytes, "raw"), "pieces"),
        (Announce(T, len(PLAN.pieces), PLAN.nbytes + 1, "raw"), "raw_bytes"),
        (Announce(T, len(PLAN.pieces), PLAN.nbytes, "int4"), "codec"),
    ],
)
def test_an_announce_that_differs_from_the_plan_is_a_violation(announce: Announce, field: str) -> None:
    with pytest.raises(TransferViolation) as caught:
        IncomingTransfer(PLAN, ticket(), ("raw",)).check_announce(announce)
    assert caught.value.field == field


def test_an_announce_may_come_again_but_only_the_same() -> None:
    incoming = IncomingTransfer(PLAN, ticket(), ("raw", "lossless"))
    for _ in range(2):
        incoming.check_announce(Announce(T, len(PLAN.pieces), PLAN.nbytes, "raw"))
    with pytest.raises(TransferViolation, match="codec"):
        incoming.check_announce(Announce(T, len(PLAN.pieces), PLAN.nbytes, "lossless"))


def test_damaged_bytes_are_noticed_and_do_not_count_as_verified() -> None:
    incoming = announced()
    incoming.check_data(headers(OutgoingTransfer(PLAN, ticket()))[0])
    incoming.arrived(0)
    with pytest.raises(TransferViolation, match="piece 0 arrived damaged"):
        incoming.verified(0, piece_digest([payload(0)[:-1] + b"?"]))
    assert incoming.next_seq == 0


def test_a_piece_is_verified_once_and_only_after_its_arrival() -> None:
    incoming = announced()
    with pytest.raises(ValueError, match="piece 0"):
        incoming.verified(0, piece_digest([payload(0)]))
    incoming.check_data(headers(OutgoingTransfer(PLAN, ticket()))[0])
    with pytest.raises(ValueError, match="piece 0"):
        incoming.verified(0, piece_digest([payload(0)]))
    incoming.arrived(0)
    incoming.verified(0, piece_digest([payload(0)]))
    with pytest.raises(ValueError, match="piece 0"):
        incoming.verified(0, piece_digest([payload(0)]))


@pytest.mark.parametrize("missing", range(len(PLAN.pieces)))
def test_a_transfer_with_any_piece_missing_fails_closed_and_names_it(missing: int) -> None:
    out, incoming = OutgoingTransfer(PLAN, ticket()), announced()
    for data in headers(out):
        incoming.check_data(data)
        incoming.arrived(data.seq)
        if data.seq != missing:
            incoming.verified(data.seq, data.digest)
    with pytest.raises(TransferViolation, match=f"piece {missing} of {len(PLAN.pieces)} is missing"):
        incoming.finish(out.manifest(0.0))


def complete() -> tuple[OutgoingTransfer, IncomingTransfer]:
    out, incoming = OutgoingTransfer(PLAN, ticket()), announced()
    for data in headers(out):
        incoming.check_data(data)
        incoming.arrived(data.seq)
        incoming.verified(data.seq, data.digest)
    return out, incoming


def test_a_manifest_that_disagrees_is_refused_and_the_piece_named() -> None:
    out, incoming = complete()
    good = out.manifest(0.0)
    digests = bytearray(good.digests)
    digests[16 * 3 + 5] ^= 1
    with pytest.raises(TransferViolation, match="piece 3 was sent with another digest"):
        incoming.finish(Manifest(T, bytes(digests), 0.0))
    with pytest.raises(TransferViolation, match="digests"):
        incoming.finish(Manifest(T, good.digests[:-16], 0.0))
    with pytest.raises(TransferViolation, match="transfer"):
        incoming.finish(Manifest(b"u" * 16, good.digests, 0.0))


def test_the_ticket_bounds_the_plan() -> None:
    for end in (lambda t: IncomingTransfer(PLAN, t, ("raw",)), lambda t: OutgoingTransfer(PLAN, t)):
        with pytest.raises(TransferViolation, match="byte_cap"):
            end(ticket(byte_cap=PLAN.nbytes - 1))
        for change in ({"start": 0}, {"stop": 41}, {"chunk_tokens": 8}):
            with pytest.raises(ValueError, match="does not follow"):
                end(ticket(**change))


def test_headers_are_made_in_plan_order_and_all_before_the_manifest() -> None:
    out = OutgoingTransfer(PLAN, ticket())
    with pytest.raises(ValueError, match="piece 1 is not the next"):
        out.header(PLAN.pieces[1], "raw", 1, bytes(16))
    with pytest.raises(ValueError, match="piece 0 of"):
        out.manifest(0.0)


def test_acks_are_cumulative_and_old_ones_change_nothing() -> None:
    out = OutgoingTransfer(PLAN, ticket())
    headers(out)
    for next_seq in (2, 4, 4, 3):
        out.on_ack(Ack(T, next_seq))
    assert out.acked_seq == 4
    assert not out.committed
    out.on_ack(Ack(T, len(PLAN.pieces), committed=True))
    out.on_ack(Ack(T, 1))
    assert out.committed


@pytest.mark.parametrize("ack", [Ack(T, 2), Ack(T, -1), Ack(b"u" * 16, 1), Ack(T, 1, committed=True)])
def test_an_ack_of_what_was_not_sent_is_a_violation(ack: Ack) -> None:
    out = OutgoingTransfer(PLAN, ticket())
    out.header(PLAN.pieces[0], "raw", 1, bytes(16))
    with pytest.raises(TransferViolation):
        out.on_ack(ack)


def test_a_header_whose_payload_is_not_taken_is_checked_and_not_remembered() -> None:
    incoming = announced()
    data = headers(OutgoingTransfer(PLAN, ticket()))[0]
    assert incoming.check_header(data) == PLAN.pieces[0]
    with pytest.raises(TransferViolation, match="layer"):
        incoming.check_header(msgspec.structs.replace(data, layer=7))
    assert incoming.wire_bytes == 0
    with pytest.raises(ValueError, match="not waiting"):
        incoming.verified(0, data.digest)
    assert incoming.check_data(data) == PLAN.pieces[0]
    assert incoming.wire_bytes == data.wire_bytes


@pytest.mark.parametrize("missed", [(2,), (-1,), (0, 0)])
def test_a_grant_can_only_miss_what_was_sent_and_each_piece_once(missed: tuple[int, ...]) -> None:
    out = OutgoingTransfer(PLAN, ticket())
    for piece in PLAN.pieces[:2]:
        out.header(piece, "raw", piece.nbytes, piece_digest([payload(piece.seq)]))
    out.check_grant(Grant(T, (1, 0)))
    with pytest.raises(TransferViolation, match="missed"):
        out.check_grant(Grant(T, missed))
