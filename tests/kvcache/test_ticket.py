"""What a ticket permits, and everything that is refused."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from kvcache.ticket import MAX_LIFETIME_S, Ticket, TicketError, claimed_transfer, sign_ticket, verify_ticket

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
NOW = 1_800_000_000.0
TICKET = Ticket(
    transfer=bytes(range(16)),
    request_id="req-1",
    attempt=0,
    prefill_node="p1",
    prefill_incarnation="i1",
    decode_key=bytes(32),
    fingerprint="0" * 32,
    start=0,
    stop=1000,
    chunk_tokens=256,
    byte_cap=1 << 30,
    issued=NOW,
    deadline=NOW + 60,
)


def forged(**changes: Any) -> bytes:
    """A rightly signed ticket that sign_ticket would not make."""
    body = msgspec.msgpack.encode(msgspec.structs.replace(TICKET, **changes))
    return b"\x01" + KEY.sign(b"prfaas ticket 1\0" + body) + body


def refusal(data: bytes, now: float = NOW, public: bytes = PUBLIC) -> str:
    with pytest.raises(TicketError) as caught:
        verify_ticket(data, public, now)
    assert str(caught.value).startswith(f"ticket {caught.value.field}: ")
    return caught.value.field


def test_a_signed_ticket_is_read_back_whole() -> None:
    assert verify_ticket(sign_ticket(TICKET, KEY), PUBLIC, NOW) == TICKET


def test_the_signed_form_is_version_signature_and_body() -> None:
    assert sign_ticket(TICKET, KEY) == forged()


def test_another_gateways_signature_is_refused() -> None:
    other = Ed25519PrivateKey.generate()
    assert refusal(sign_ticket(TICKET, other)) == "signature"
    assert refusal(sign_ticket(TICKET, KEY), public=other.public_key().public_bytes_raw()) == "signature"


@given(st.data())
def test_no_flipped_bit_goes_unnoticed(data: st.DataObject) -> None:
    damaged = bytearray(sign_ticket(TICKET, KEY))
    at = data.draw(st.integers(0, len(damaged) - 1))
    damaged[at] ^= 1 << data.draw(st.integers(0, 7))
    assert refusal(bytes(damaged)) == ("signature" if at else "version")


@given(st.binary(max_size=300))
def test_rubbish_is_refused(data: bytes) -> None:
    assert refusal(data) in ("size", "version", "signature")


def test_a_ticket_cut_short_or_blown_up_is_refused() -> None:
    signed = sign_ticket(TICKET, KEY)
    assert refusal(signed[:-1]) == "signature"
    assert refusal(signed[:65]) == "size"
    assert refusal(signed + b"\0" * 5000) == "size"


def test_a_signature_under_another_label_is_no_ticket() -> None:
    body = msgspec.msgpack.encode(TICKET)
    assert refusal(b"\x01" + KEY.sign(body) + body) == "signature"


def test_a_signed_body_that_is_no_ticket_is_refused() -> None:
    for body in (b"\xc1", msgspec.msgpack.encode([1, 2]), msgspec.msgpack.encode({"transfer": 1})):
        assert refusal(b"\x01" + KEY.sign(b"prfaas ticket 1\0" + body) + body) == "body"


def test_fields_of_a_later_version_are_ignored() -> None:
    body = msgspec.msgpack.encode([*msgspec.structs.astuple(TICKET), "new"])
    assert verify_ticket(b"\x01" + KEY.sign(b"prfaas ticket 1\0" + body) + body, PUBLIC, NOW) == TICKET


BAD_FIELDS: list[tuple[str, Any]] = [
    ("transfer", b"short"),
    ("decode_key", bytes(31)),
    ("request_id", ""),
    ("request_id", "x" * 257),
    ("attempt", -1),
    ("attempt", 1 << 17),
    ("prefill_node", ""),
    ("prefill_incarnation", ""),
    ("fingerprint", ""),
    ("start", -1),
    ("start", 1 << 40),
    ("stop", 0),
    ("stop", (1 << 31) + 1),
    ("chunk_tokens", 0),
    ("byte_cap", 0),
    ("byte_cap", 1 << 60),
    ("issued", float("nan")),
    ("deadline", float("inf")),
    ("deadline", NOW),
    ("deadline", NOW + MAX_LIFETIME_S + 1),
]


@pytest.mark.parametrize(("field", "value"), BAD_FIELDS)
def test_a_field_out_of_bounds_is_named_by_signer_and_verifier(field: str, value: Any) -> None:
    with pytest.raises(TicketError, match=f"^ticket {field}: "):
        sign_ticket(msgspec.structs.replace(TICKET, **{field: value}), KEY)
    assert refusal(forged(**{field: value})) == field


@pytest.mark.parametrize(
    ("now", "field"),
    [
        (NOW - 2.1, "issued"),
        (NOW - 1.9, None),
        (NOW + 60, None),
        (NOW + 61.9, None),
        (NOW + 62.1, "deadline"),
    ],
)
def test_a_ticket_is_in_force_from_issue_to_deadline_give_or_take_two_seconds(now: float, field: str | None) -> None:
    signed = sign_ticket(TICKET, KEY)
    if field is None:
        assert verify_ticket(signed, PUBLIC, now) == TICKET
    else:
        assert refusal(signed, now) == field


def test_the_allowed_skew_is_the_callers_choice() -> None:
    with pytest.raises(TicketError, match=r"0\.5 s in the future, 0\.1 s of clock skew"):
        verify_ticket(sign_ticket(TICKET, KEY), PUBLIC, NOW - 0.5, skew_s=0.1)


def nested(depth: int) -> bytes:
    """A body of a later version whose last field nests ``depth`` arrays."""
    body = bytearray(msgspec.msgpack.encode(TICKET))
    body[0] += 1
    return bytes(body) + b"\x91" * depth + b"\x00"


def test_a_body_nested_too_deeply_is_refused_and_does_no_harm() -> None:
    body = nested(3500)
    assert refusal(b"\x01" + KEY.sign(b"prfaas ticket 1\0" + body) + body) == "body"
    assert claimed_transfer(bytes(65) + body) is None


def test_an_unverified_ticket_tells_the_transfer_it_claims() -> None:
    assert claimed_transfer(bytes(65) + msgspec.msgpack.encode(TICKET)) == TICKET.transfer
    assert claimed_transfer(forged(transfer=bytes(17))) is None
    assert claimed_transfer(forged(request_id="x" * 5000)) is None


@given(st.binary(max_size=300))
def test_rubbish_claims_no_transfer(data: bytes) -> None:
    assert claimed_transfer(data) is None
