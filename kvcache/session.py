"""The handshake of two nodes, and whether a peer still lives. Sans-I/O: frames in, frames out, the time is handed in.

The node that dialled says Hello, the other answers Hello; then each sends a Proof in the same order: Ed25519 over both
Hellos as they were sent, with their fresh nonces, under a label that names the signer's side, so that a Proof can be
neither replayed nor mirrored. Each side answers only what it has accepted, so the node that dialled knows at the end
that it was accepted. Roles are not sides: either node may have dialled.
"""

from __future__ import annotations

from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from kvcache.wire import (
    HEADER_BYTES,
    OLDEST_WIRE_VERSION,
    WIRE_VERSION,
    Abort,
    Frame,
    Hello,
    Ping,
    Pong,
    Proof,
    Role,
    encode_frame,
)

NONCE_BYTES = 32
KEY_BYTES = 32
MAX_NAME_CHARS = 256
MAX_DETAIL_CHARS = 512
REFUSED = "refused "

_LABELS = {True: b"prfaas-kv-1 dialled\0", False: b"prfaas-kv-1 accepted\0"}


class PeerRefused(Exception):
    """The two nodes must not talk. ``field`` names what differs; ``by_peer`` says which side noticed."""

    def __init__(self, field: str, detail: str, by_peer: bool = False) -> None:
        super().__init__(f"{'peer refused ' if by_peer else ''}{field}: {detail}")
        self.field = field
        self.detail = detail
        self.by_peer = by_peer

    def abort(self) -> Abort:
        """What to tell the other side before closing."""
        return Abort(b"", REFUSED + self.field, self.detail[:MAX_DETAIL_CHARS])


@dataclass(frozen=True, slots=True)
class PeerIdentity:
    """What a peer said of itself; its key is proved."""

    node_id: str
    incarnation: str
    role: Role
    public_key: bytes
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Expected:
    """Whom a node means to reach, as its gateway knows that peer. The key is what binds the three together."""

    node_id: str
    incarnation: str
    public_key: bytes

    def refusal(self, peer: PeerIdentity | Hello) -> PeerRefused | None:
        """Why ``peer`` is somebody else; None where it is the one."""
        for field in ("node_id", "incarnation"):
            found, wanted = getattr(peer, field), getattr(self, field)
            if found != wanted:
                return PeerRefused(field, f"{wanted!r} was expected, {found!r} answers")
        if peer.public_key != self.public_key:
            return PeerRefused("public_key", f"{self.node_id!r} answers with another key than the gateway knows")
        return None


class Session:
    """One side of one connection's handshake.

    Send ``start()``, feed each received frame to ``receive`` and send what it returns, until ``peer`` is set. ``nonce``
    is 32 fresh random bytes.
    """

    def __init__(
        self,
        me: PeerIdentity,
        key: Ed25519PrivateKey,
        dialled: bool,
        expected: Expected | None,
        nonce: bytes,
        version: int = WIRE_VERSION,
        oldest_version: int = OLDEST_WIRE_VERSION,
    ) -> None:
        self.peer: PeerIdentity | None = None
        self.version = oldest_version
        """The version both sides speak; until Hello has come, the oldest one, which any peer reads."""
        self._mine = Hello(
            version, oldest_version, me.node_id, me.incarnation, me.role, me.public_key, nonce, me.fingerprint
        )
        self._my_hello = encode_frame(self._mine, oldest_version)
        self._key = key
        self.dialled = dialled
        self._expected = expected
        self._theirs: Hello | None = None
        self._their_body = b""

    def start(self) -> bytes:
        """What to send first; nothing on the side that was dialled."""
        return self._my_hello if self.dialled else b""

    def receive(self, frame: Frame, hello_body: bytes = b"") -> bytes:
        """The answer to one frame, as bytes; ``hello_body`` is a Hello's body as it was sent. Raises PeerRefused."""
        if isinstance(frame, Abort):
            raise PeerRefused(frame.reason.removeprefix(REFUSED), frame.detail, by_peer=True)
        if self._theirs is None:
            if not isinstance(frame, Hello):
                raise PeerRefused("handshake", f"{type(frame).__name__} came where Hello belongs")
            self._check(frame)
            self._theirs, self._their_body = frame, hello_body
            self.version = min(frame.version, self._mine.version)
            return self._proof() if self.dialled else self._my_hello
        if not isinstance(frame, Proof) or self.peer is not None:
            raise PeerRefused("handshake", f"{type(frame).__name__} came where Proof belongs")
        hello = self._theirs
        try:
            Ed25519PublicKey.from_public_bytes(hello.public_key).verify(
                frame.signature, self._transcript(not self.dialled)
            )
        except (InvalidSignature, ValueError):
            raise PeerRefused("public_key", "the peer does not hold the key that it named") from None
        self.peer = PeerIdentity(hello.node_id, hello.incarnation, hello.role, hello.public_key, hello.fingerprint)
        return b"" if self.dialled else self._proof()

    def _proof(self) -> bytes:
        return encode_frame(Proof(self._key.sign(self._transcript(self.dialled))), self.version)

    def _transcript(self, dialled: bool) -> bytes:
        """What the side that dialled (or accepted) signs: both Hellos, the dialling side's first, lengths included."""
        mine = self._my_hello[HEADER_BYTES:]
        bodies = (mine, self._their_body) if self.dialled else (self._their_body, mine)
        return _LABELS[dialled] + b"".join(len(body).to_bytes(4, "big") + body for body in bodies)

    def _check(self, hello: Hello) -> None:
        mine = self._mine
        if min(hello.version, mine.version) < max(hello.oldest_version, mine.oldest_version):
            raise PeerRefused(
                "version",
                f"{hello.node_id!r} speaks {hello.oldest_version} to {hello.version}, "
                f"{mine.node_id!r} speaks {mine.oldest_version} to {mine.version}",
            )
        if len(hello.public_key) != KEY_BYTES or hello.public_key == mine.public_key:
            raise PeerRefused("public_key", "not a key of another node")
        if len(hello.nonce) != NONCE_BYTES:
            raise PeerRefused("nonce", f"{len(hello.nonce)} bytes, expected {NONCE_BYTES}")
        for field, name in (("node_id", hello.node_id), ("incarnation", hello.incarnation)):
            if not 1 <= len(name) <= MAX_NAME_CHARS:
                raise PeerRefused(field, f"{len(name)} characters, expected 1 to {MAX_NAME_CHARS}")
        refusal = self._expected.refusal(hello) if self._expected is not None else None
        if refusal is not None:
            raise refusal
        if hello.fingerprint != mine.fingerprint:
            raise PeerRefused(
                "fingerprint",
                f"{hello.node_id!r} has {hello.fingerprint!r}, {mine.node_id!r} has {mine.fingerprint!r}: "
                "both nodes must serve the same weights, tokenizer, layout and dtype",
            )


class Liveness:
    """Decides from what was heard, and when, whether to ping and whether the peer is lost.

    Call ``tick(now)`` every ``tick_s`` or so. Time in which this process itself stood still, or in which it did not
    read because its own consumer was slow (``suspended``), is not held against the peer.
    """

    def __init__(self, now: float, ping_every_s: float, lost_after_s: float) -> None:
        self.tick_s = ping_every_s / 4
        self.rtt_s = 0.0
        """The last ping's round trip, this process's own delays included; 0 before the first."""
        self._ping_every_s = ping_every_s
        self._lost_after_s = lost_after_s
        self._heard = now
        self._ticked = now
        self._pinged = now
        self._token = 0
        self._answered = True

    def heard(self, now: float) -> None:
        """Bytes came from the peer."""
        self._heard = now

    def pong(self, pong: Pong, now: float) -> None:
        """Take the round trip from an answer to the last ping; others are old or invented."""
        if pong.token == self._token and not self._answered:
            self._answered = True
            self.rtt_s = now - self._pinged

    def tick(self, now: float, suspended: bool = False) -> Ping | None:
        """A ping to send, if one is due."""
        own_stall = now - self._ticked - self.tick_s
        if suspended:
            self._heard = now
        elif own_stall > self._ping_every_s:
            self._heard = min(now, self._heard + own_stall)
        self._ticked = now
        if now - self._pinged < self._ping_every_s:
            return None
        self._pinged = now
        self._token += 1
        self._answered = False
        return Ping(self._token)

    def lost(self, now: float) -> bool:
        """Whether the peer has been silent for too long."""
        return now - self._heard > self._lost_after_s
