"""Both ends of one transfer as state machines: frames are checked against the plan, never trusted. Sans-I/O."""

from __future__ import annotations

from collections.abc import Sequence

from kvcache import codecs
from kvcache.digest import kv_digest
from kvcache.plan import Piece, TransferPlan
from kvcache.ticket import Ticket
from kvcache.wire import DIGEST_BYTES, Ack, Announce, Data, Grant, Manifest


class TransferViolation(Exception):
    """The other side broke the plan or sent damaged bytes: the transfer must be aborted. ``field`` names what."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


def _check_plan(plan: TransferPlan, ticket: Ticket) -> None:
    if (plan.start, plan.stop, plan.chunk_tokens) != (ticket.start, ticket.stop, ticket.chunk_tokens):
        raise ValueError(
            f"plan of [{plan.start}, {plan.stop}) by {plan.chunk_tokens} does not follow from the ticket's "
            f"[{ticket.start}, {ticket.stop}) by {ticket.chunk_tokens}"
        )
    if plan.nbytes > ticket.byte_cap:
        raise TransferViolation("byte_cap", f"the plan takes {plan.nbytes} bytes, the ticket allows {ticket.byte_cap}")


class IncomingTransfer:
    """The decode side: Announce, then every piece in any order, and a Manifest that accounts for all.

    A piece that was lost on its way comes again, and so may one that was not. The Manifest may overtake pieces.

    ``codec_names`` are the single codecs that the Open offered; any set of them may be announced. Raises
    TransferViolation where the plan exceeds the ticket's cap, ValueError where it is not the ticket's plan.
    """

    def __init__(
        self,
        plan: TransferPlan,
        ticket: Ticket,
        codec_names: Sequence[str],
        transforms: Sequence[codecs.Transform] = (),
    ) -> None:
        _check_plan(plan, ticket)
        self.plan = plan
        self.next_seq = 0
        """All pieces below are verified: what an Ack says."""
        self.wire_bytes = 0
        """Payload bytes announced by the Data headers so far."""
        self._transfer = ticket.transfer
        self._codec_names = tuple(codec_names)
        self._transforms = tuple(transforms)
        self._codec: codecs.CodecSet | None = None
        self._digests: dict[int, bytes] = {}
        self._under_way: set[int] = set()
        self._kinds: dict[tuple[int, int, int], tuple[str, codecs.Codec]] = {}
        self._verified: set[int] = set()

    @property
    def codec(self) -> codecs.CodecSet | None:
        """The announced codecs, None before the Announce."""
        return self._codec

    def check_announce(self, announce: Announce) -> None:
        """Accept an Announce; a repeat changes nothing. Raises TransferViolation where it differs from the plan or from
        the first.
        """
        self._same("transfer", announce.transfer, self._transfer)
        self._same("pieces", announce.pieces, len(self.plan.pieces))
        self._same("raw_bytes", announce.raw_bytes, self.plan.nbytes)
        if self._codec is not None:
            self._same("codec", announce.codec, self._codec.name)
            return
        try:
            announced = codecs.set_by_name(announce.codec, self._transforms)
            announced.check(self.plan.layout)
        except (codecs.UnknownCodec, codecs.CodecError) as error:
            raise TransferViolation("codec", str(error)) from error
        if not announced.members.issubset(self._codec_names):
            raise TransferViolation("codec", f"{announce.codec!r} was not offered, only {', '.join(self._codec_names)}")
        self._codec = announced

    def check_data(self, data: Data) -> Piece | None:
        """The piece that this header belongs to; None where it has arrived already.

        One that is under way is returned again: it may never arrive over the connection that it first came by. Raises
        TransferViolation on any difference from the plan, or from the piece's first header.
        """
        piece = self.check_header(data)
        known = self._digests.get(data.seq)
        if known is not None:
            self._same("digest", data.digest, known)
            return piece if data.seq in self._under_way else None
        self._digests[data.seq] = data.digest
        self._under_way.add(data.seq)
        self.wire_bytes += data.wire_bytes
        return piece

    def check_header(self, data: Data) -> Piece:
        """The piece that this header belongs to, whose payload is not taken: nothing of it is remembered.

        Raises TransferViolation on any difference from the plan.
        """
        if self._codec is None:
            raise TransferViolation("data", "came before the Announce")
        self._same("transfer", data.transfer, self._transfer)
        if not 0 <= data.seq < len(self.plan.pieces):
            raise TransferViolation("seq", f"{data.seq}, but the plan ends at {len(self.plan.pieces) - 1}")
        piece = self.plan.pieces[data.seq]
        tensor = piece.group, piece.layer, piece.tensor
        if (data.group, data.layer, data.tensor, data.start, data.stop) != (*tensor, piece.start, piece.stop):
            for field in ("group", "layer", "tensor", "start", "stop"):
                self._same(field, getattr(data, field), getattr(piece, field))
        kind = self._kinds.get(tensor)
        if kind is None:
            kind = self._kinds[tensor] = self.plan.tensor(piece).dtype.value, self._codec.of(self.plan, piece)
        dtype, codec = kind
        self._same("dtype", data.dtype, dtype)
        self._same("codec", data.codec, codec.name)
        self._same("raw_bytes", data.raw_bytes, piece.nbytes)
        limit = codec.max_wire_bytes(piece.nbytes)
        if not 0 < data.wire_bytes <= limit:
            raise TransferViolation("wire_bytes", f"{data.wire_bytes}, expected 1 to {limit} for {data.codec}")
        self._same("digest", len(data.digest), DIGEST_BYTES)
        return piece

    def arrived(self, seq: int) -> None:
        """The payload of a piece that was under way is here."""
        self._under_way.remove(seq)

    def verified(self, seq: int, digest: bytes) -> None:
        """Piece ``seq`` has arrived and ``digest`` was computed from its bytes here; pieces may come in any order.

        Raises TransferViolation where it differs from the header's.
        """
        waiting = seq in self._digests and seq not in self._under_way
        if not waiting or seq < self.next_seq or seq in self._verified:
            raise ValueError(f"piece {seq} is not waiting to be verified")
        if digest != self._digests[seq]:
            wanted = self._digests[seq].hex()
            raise TransferViolation("digest", f"piece {seq} arrived damaged: {digest.hex()}, sent as {wanted}")
        self._verified.add(seq)
        while self.next_seq in self._verified:
            self._verified.remove(self.next_seq)
            self.next_seq += 1

    def finish(self, manifest: Manifest) -> bytes:
        """The digest over all pieces, once every one is verified and the manifest agrees.

        Raises TransferViolation naming what is missing or differs. ``next_seq`` must have reached the plan's end
        before a manifest can be accepted: where decoding is still under way, wait for it first.
        """
        self._same("transfer", manifest.transfer, self._transfer)
        if self.next_seq < len(self.plan.pieces):
            raise TransferViolation("pieces", f"piece {self.next_seq} of {len(self.plan.pieces)} is missing")
        self._same("digests", len(manifest.digests), len(self.plan.pieces) * DIGEST_BYTES)
        digests = b"".join(self._digests[seq] for seq in range(len(self.plan.pieces)))
        if manifest.digests != digests:
            at = next(n for n, (a, b) in enumerate(zip(manifest.digests, digests, strict=True)) if a != b)
            raise TransferViolation("digests", f"piece {at // DIGEST_BYTES} was sent with another digest")
        return kv_digest(digests)

    def _same(self, field: str, found: object, wanted: object) -> None:
        if found != wanted:
            shown = (v.hex() if isinstance(v, bytes) else repr(v) for v in (found, wanted))
            raise TransferViolation(field, "{}, the plan says {}".format(*shown))


class OutgoingTransfer:
    """The prefill side: headers in plan order, some of them again, a manifest, and what the other side acknowledged."""

    def __init__(self, plan: TransferPlan, ticket: Ticket) -> None:
        _check_plan(plan, ticket)
        self.plan = plan
        self.acked_seq = 0
        """The other side has verified all pieces below."""
        self.committed = False
        """The other side has committed: the exported pages are no longer needed."""
        self.wire_bytes = 0
        """Payload bytes of the headers made so far."""
        self.transfer = ticket.transfer
        self._digests: list[bytes] = []
        self._dtypes: dict[tuple[int, int, int], str] = {}

    @property
    def sent(self) -> int:
        """Pieces whose header was made: the next one's seq."""
        return len(self._digests)

    def announce(self, codec: str) -> Announce:
        """The frame that opens the transfer."""
        return Announce(self.transfer, len(self.plan.pieces), self.plan.nbytes, codec)

    def header(self, piece: Piece, codec: str, wire_bytes: int, digest: bytes) -> Data:
        """The frame of the next piece, or once more that of an earlier one.

        Raises ValueError where it is not the next one of the plan, or its bytes have changed since.
        """
        if piece.seq > self.sent or piece != self.plan.pieces[piece.seq]:
            raise ValueError(f"piece {piece.seq} is not the next of the plan, {self.sent} is")
        if piece.seq < self.sent:
            if digest != self._digests[piece.seq]:
                raise ValueError(f"piece {piece.seq} is not what it was when it was first sent")
        else:
            self._digests.append(digest)
            self.wire_bytes += wire_bytes
        tensor = piece.group, piece.layer, piece.tensor
        dtype = self._dtypes.get(tensor)
        if dtype is None:
            dtype = self._dtypes[tensor] = self.plan.tensor(piece).dtype.value
        return Data(
            self.transfer,
            piece.seq,
            piece.group,
            piece.layer,
            piece.tensor,
            piece.start,
            piece.stop,
            dtype,
            codec,
            piece.nbytes,
            wire_bytes,
            digest,
        )

    def check_grant(self, grant: Grant) -> None:
        """Raises TransferViolation for a Grant that misses what was never sent, or anything twice."""
        if any(not 0 <= seq < self.sent for seq in grant.missed):
            raise TransferViolation("missed", f"names a piece outside the {self.sent} that were sent")
        if len(set(grant.missed)) != len(grant.missed):
            raise TransferViolation("missed", "names a piece twice")

    def manifest(
        self,
        computed_after_s: float,
        granted: bool = True,
        transport: str = "tcp",
        failed: tuple[str, ...] = (),
        backlog: int = 0,
    ) -> Manifest:
        """The closing frame. Raises ValueError before the last piece."""
        if self.sent < len(self.plan.pieces):
            raise ValueError(f"piece {self.sent} of {len(self.plan.pieces)} was not sent")
        digests = b"".join(self._digests)
        return Manifest(self.transfer, digests, computed_after_s, granted, transport, failed, backlog)

    def on_ack(self, ack: Ack) -> None:
        """Take an acknowledgement; repeated and overtaken ones change nothing.

        Raises TransferViolation for one that acknowledges what was never sent.
        """
        if ack.transfer != self.transfer:
            raise TransferViolation("transfer", "acknowledges another transfer")
        if not 0 <= ack.next_seq <= self.sent:
            raise TransferViolation("next_seq", f"{ack.next_seq} acknowledged, {self.sent} sent")
        if ack.committed and ack.next_seq < len(self.plan.pieces):
            raise TransferViolation("committed", f"with piece {ack.next_seq} of {len(self.plan.pieces)} missing")
        self.acked_seq = max(self.acked_seq, ack.next_seq)
        self.committed = self.committed or ack.committed
