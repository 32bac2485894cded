"""Two nodes agree on who they are before anything else is said, and notice when the other falls silent."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvcache.framing import FrameParser
from kvcache.session import Expected, Liveness, PeerIdentity, PeerRefused, Session
from kvcache.wire import HEADER_BYTES, Abort, Frame, Grant, Hello, Kind, Ping, Pong, Proof, Role, encode_frame, header

KEYS = {name: Ed25519PrivateKey.from_private_bytes(name.encode() * 32) for name in "abm"}
PUBLIC = {name: key.public_key().public_bytes_raw() for name, key in KEYS.items()}


def identity(name: str, **changes: object) -> PeerIdentity:
    me = PeerIdentity(name, f"{name}-1", Role.PREFILL, KEYS[name].public_key().public_bytes_raw(), "same")
    return replace(me, **changes)  # type: ignore[arg-type]


class Side:
    """A session and its parser."""

    def __init__(self, me: PeerIdentity, dialled: bool, **options: object) -> None:
        nonce = me.node_id.encode() * 32
        options.setdefault("expected", None)
        options.setdefault("key", KEYS[me.node_id[0]])
        self.session = Session(me, dialled=dialled, nonce=nonce, **options)  # type: ignore[arg-type]
        self.parser = FrameParser(oldest_version=1, newest_version=9)

    def take(self, data: bytes) -> bytes:
        """Answer the bytes of whole frames."""
        answer = b""
        for begin in range(0, len(data), 1000):
            part = data[begin : begin + 1000]
            self.parser.get_buffers()[0][: len(part)] = part
            self.parser.buffer_updated(len(part))
            while (frame := self.parser.next_frame()) is not None:
                answer += self.session.receive(frame, self.parser.hello_body)
        return answer


def converse(dialler: Side, acceptor: Side) -> None:
    """Carry bytes to and fro until both are silent."""
    outgoing = dialler.session.start()
    assert acceptor.session.start() == b""
    while outgoing:
        back = acceptor.take(outgoing)
        outgoing = dialler.take(back) if back else b""


def test_both_sides_learn_who_the_other_is() -> None:
    a, b = (
        Side(identity("a"), True, expected=Expected("b", "b-1", PUBLIC["b"])),
        Side(identity("b", role=Role.DECODE), False),
    )
    converse(a, b)
    assert a.session.peer == identity("b", role=Role.DECODE)
    assert b.session.peer == identity("a")
    assert a.session.version == b.session.version == 1


def test_the_node_that_dialled_is_accepted_before_it_believes_so() -> None:
    a, b = Side(identity("a"), True), Side(identity("b"), False)
    proof = a.take(b.take(a.session.start()))
    assert a.session.peer is None
    assert b.session.peer is None
    last = b.take(proof)
    assert b.session.peer is not None
    assert a.session.peer is None
    assert a.take(last) == b""
    assert a.session.peer is not None


def test_another_fingerprint_is_refused_by_name_with_both_values() -> None:
    a, b = Side(identity("a"), True), Side(identity("b", fingerprint="other"), False)
    with pytest.raises(PeerRefused, match=r"'a' has 'same', 'b' has 'other'") as caught:
        converse(a, b)
    assert caught.value.field == "fingerprint"
    with pytest.raises(PeerRefused) as told:
        a.session.receive(caught.value.abort())
    assert (told.value.field, told.value.by_peer) == ("fingerprint", True)
    assert "'other'" in told.value.detail


def test_a_refusal_is_small_enough_to_be_read_whatever_the_other_side_said() -> None:
    """A stranger reads no more than 4 KiB before the handshake's end."""
    with pytest.raises(PeerRefused) as caught:
        converse(Side(identity("a", fingerprint="é" * 1500), True), Side(identity("b"), False))
    parser = FrameParser()
    told = encode_frame(caught.value.abort())
    parser.get_buffers()[0][: len(told)] = told
    parser.buffer_updated(len(told))
    assert parser.next_frame() == caught.value.abort()


@pytest.mark.parametrize(
    ("expected", "field"),
    [
        (Expected("c", "b-1", PUBLIC["b"]), "node_id"),
        (Expected("b", "b-0", PUBLIC["b"]), "incarnation"),
        (Expected("b", "b-1", PUBLIC["m"]), "public_key"),
    ],
)
def test_whoever_else_answers_at_the_address_is_refused(expected: Expected, field: str) -> None:
    with pytest.raises(PeerRefused) as caught:
        converse(Side(identity("a"), True, expected=expected), Side(identity("b"), False))
    assert caught.value.field == field


@pytest.mark.parametrize("liar", ["dialler", "acceptor"])
def test_a_key_that_is_named_but_not_held_is_refused(liar: str) -> None:
    a = Side(identity("a"), True, key=KEYS["m" if liar == "dialler" else "a"])
    b = Side(identity("b"), False, key=KEYS["m" if liar == "acceptor" else "b"])
    with pytest.raises(PeerRefused) as caught:
        converse(a, b)
    assert caught.value.field == "public_key"


def test_a_proof_cannot_be_replayed_against_a_new_nonce() -> None:
    a, b = Side(identity("a"), True), Side(identity("b"), False)
    recorded_hello = a.session.start()
    recorded_proof = a.take(b.take(recorded_hello))
    again = Session(identity("b"), KEYS["b"], False, None, b"another nonce, as each one is new!"[:32])
    fresh = Side(identity("b"), False)
    fresh.session = again
    fresh.take(recorded_hello)
    with pytest.raises(PeerRefused, match="public_key"):
        fresh.take(recorded_proof)


def test_a_node_that_is_mirrored_to_itself_refuses() -> None:
    a = Side(identity("a"), True)
    with pytest.raises(PeerRefused, match="public_key"):
        a.take(a.session.start())


def test_a_proof_of_the_other_side_is_not_taken_for_ones_own() -> None:
    a, b = Side(identity("a"), True), Side(identity("b"), False)
    a.take(b.take(a.session.start()))
    mirrored = b.session._proof()
    with pytest.raises(PeerRefused, match="public_key"):
        b.take(mirrored)


def test_neighbouring_versions_speak_the_older_one() -> None:
    a = Side(identity("a"), True, version=2, oldest_version=1)
    b = Side(identity("b"), False, version=3, oldest_version=2)
    converse(a, b)
    assert a.session.version == b.session.version == 2


def test_versions_without_a_common_one_are_refused_by_name() -> None:
    with pytest.raises(PeerRefused, match="'a' speaks 1 to 1, 'b' speaks 2 to 3") as caught:
        converse(Side(identity("a"), True), Side(identity("b"), False, version=3, oldest_version=2))
    assert caught.value.field == "version"


def test_fields_that_a_newer_hello_appends_are_covered_by_the_proof() -> None:
    """The transcript holds the Hello's bytes, not what this version understood of them."""
    a, b = Side(identity("a"), True), Side(identity("b"), False)
    body = msgspec.msgpack.decode(a.session.start()[HEADER_BYTES:])
    longer = msgspec.msgpack.encode([*body, "new field"])
    a.session._my_hello = header.pack(len(longer), 1, Kind.HELLO, 0) + longer
    converse(a, b)
    assert b.session.peer == identity("a")


def test_a_hello_altered_on_the_way_is_noticed() -> None:
    a, b = Side(identity("a"), True), Side(identity("b"), False)
    altered = a.session.start().replace(b"a-1", b"a-2")
    with pytest.raises(PeerRefused, match="public_key"):
        b.take(a.take(b.take(altered)))


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"public_key": b"short"}, "public_key"),
        ({"node_id": ""}, "node_id"),
        ({"node_id": "n" * 257}, "node_id"),
        ({"incarnation": ""}, "incarnation"),
    ],
)
def test_a_hello_out_of_bounds_is_refused_by_name(change: dict[str, object], field: str) -> None:
    hello = Hello(1, 1, "a", "a-1", Role.PREFILL, KEYS["a"].public_key().public_bytes_raw(), b"n" * 32, "same")
    with pytest.raises(PeerRefused) as caught:
        Side(identity("b"), False).take(encode_frame(msgspec.structs.replace(hello, **change)))
    assert caught.value.field == field


def test_a_nonce_of_another_size_is_refused() -> None:
    hello = Hello(1, 1, "a", "a-1", Role.PREFILL, KEYS["a"].public_key().public_bytes_raw(), b"", "same")
    with pytest.raises(PeerRefused, match="nonce"):
        Side(identity("b"), False).take(encode_frame(hello))


@pytest.mark.parametrize("frame", [Proof(b""), Grant(b"t"), Ping(1)])
def test_anything_before_hello_is_refused(frame: Frame) -> None:
    with pytest.raises(PeerRefused, match="where Hello belongs"):
        Side(identity("b"), False).session.receive(frame)


def test_a_second_hello_is_refused() -> None:
    b = Side(identity("b"), False)
    hello = Side(identity("a"), True).session.start()
    b.take(hello)
    with pytest.raises(PeerRefused, match="where Proof belongs"):
        b.take(hello)


@pytest.mark.parametrize("signature", [b"", b"\0" * 64, b"\xff" * 64, b"x" * 1000])
def test_a_made_up_signature_is_refused(signature: bytes) -> None:
    b = Side(identity("b"), False)
    b.take(Side(identity("a"), True).session.start())
    with pytest.raises(PeerRefused, match="public_key"):
        b.session.receive(Proof(signature))


def test_a_refusal_from_the_peer_says_that_it_came_from_there() -> None:
    with pytest.raises(PeerRefused, match="peer refused peers: 9 are connected") as caught:
        Side(identity("a"), True).session.receive(Abort(b"", "refused peers", "9 are connected"))
    assert caught.value.by_peer


def run(live: Liveness, start: float, stop: float, suspended: bool = False) -> list[Ping]:
    """Tick through [start, stop)."""
    pings = []
    now = start
    while now < stop:
        ping = live.tick(now, suspended)
        pings += [ping] if ping else []
        now += live.tick_s
    return pings


def test_pings_come_once_a_second_and_measure_the_round_trip() -> None:
    live = Liveness(100.0, 1.0, 4.0)
    pings = run(live, 100.25, 103.1)
    assert pings == [Ping(1), Ping(2)] or pings == [Ping(1), Ping(2), Ping(3)]
    live.pong(Pong(pings[-2].token), 103.2)
    assert live.rtt_s == 0.0
    live.pong(Pong(pings[-1].token), 103.03)
    assert live.rtt_s == pytest.approx(0.03, abs=1e-6)
    live.pong(Pong(pings[-1].token), 109.0)
    assert live.rtt_s == pytest.approx(0.03, abs=1e-6)


def test_a_peer_is_lost_after_four_silent_seconds_and_not_before() -> None:
    live = Liveness(0.0, 1.0, 4.0)
    run(live, 0.25, 2.1)
    live.heard(2.0)
    run(live, 2.25, 6.1)
    assert not live.lost(5.99)
    assert live.lost(6.01)


def test_time_that_was_spent_paused_is_not_silence() -> None:
    live = Liveness(0.0, 1.0, 4.0)
    run(live, 0.25, 30.0, suspended=True)
    assert not live.lost(30.0)
    run(live, 30.0, 34.6)
    assert live.lost(34.6)


def test_a_standstill_of_this_process_is_not_the_peers_silence() -> None:
    live = Liveness(0.0, 1.0, 4.0)
    run(live, 0.25, 1.1)
    live.tick(20.0)
    assert not live.lost(20.0)
    run(live, 20.25, 24.1)
    assert live.lost(24.1)
