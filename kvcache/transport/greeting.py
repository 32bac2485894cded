"""The handshake over a real connection: TLS first where it is asked for, then the session's frames."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Callable

from kvcache.framing import FrameParser
from kvcache.session import PeerIdentity, PeerRefused, Session
from kvcache.transport.channel import Channel, SocketChannel, TlsChannel
from kvcache.wire import OLDEST_WIRE_VERSION, WireError, encode_frame

logger = logging.getLogger(__name__)

_LINGER_S = 1.0
_LINGER_BYTES = 4096
_LINGER_READS = 64


async def greet(
    sock: socket.socket,
    context: ssl.SSLContext | None,
    dialled_host: str | None,
    session: Session,
    check: Callable[[PeerIdentity], None],
) -> tuple[Channel, FrameParser]:
    """``introduce`` over a connected socket; the descriptor moves out of ``sock``."""
    sock = socket.socket(fileno=sock.detach())
    sock.setblocking(False)
    channel = SocketChannel(sock)
    if context is not None:
        try:
            channel = await TlsChannel.over(sock, context, not session.dialled, dialled_host)
        except BaseException:
            channel.close()
            raise
    return channel, await introduce(channel, session, check)


async def introduce(channel: Channel, session: Session, check: Callable[[PeerIdentity], None]) -> FrameParser:
    """Carry ``session`` to its end over an open channel.

    ``check(peer)`` may refuse a peer that has proved itself, before it learns that it has. The parser may hold
    the first bytes of what follows. Raises PeerRefused or WireError, which the peer was told, or OSError; the
    channel is closed then.
    """
    parser = FrameParser()
    try:
        try:
            await _converse(channel, parser, session, check)
        except (PeerRefused, WireError) as error:
            await _say_refused(channel, error)
            raise
    except BaseException:
        channel.close()
        raise
    return parser


async def _converse(
    channel: Channel, parser: FrameParser, session: Session, check: Callable[[PeerIdentity], None]
) -> None:
    await channel.send_all(session.start())
    while session.peer is None:
        frame = parser.next_frame()
        if frame is None:
            count = await channel.receive_some(parser.get_buffers())
            if count == 0:
                raise ConnectionResetError("closed by the peer during the handshake")
            parser.buffer_updated(count)
            continue
        answer = session.receive(frame, parser.hello_body)
        if session.peer is not None:
            check(session.peer)
        await channel.send_all(answer)
    parser.establish()


async def _say_refused(channel: Channel, error: PeerRefused | WireError) -> None:
    """Tell the peer why, and let it read that: closing with unread bytes would take the answer back."""
    if isinstance(error, WireError):
        error = PeerRefused(error.field, error.reason)
    if error.by_peer:
        return
    try:
        await channel.send_all(encode_frame(error.abort(), OLDEST_WIRE_VERSION))
        channel.finish()
        scratch = memoryview(bytearray(_LINGER_BYTES))
        async with asyncio.timeout(_LINGER_S):
            for _ in range(_LINGER_READS):
                if await channel.receive_some([scratch]) == 0:
                    return
    except OSError as failure:
        logger.debug("event=kv_refusal_untold cause=%s", failure)
