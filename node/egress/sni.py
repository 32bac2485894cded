"""The server name in a TLS ClientHello. Sans-I/O: bytes in, a name out; nothing is decrypted."""

from __future__ import annotations

from dataclasses import dataclass

MAX_HELLO_BYTES = 16 << 10
_HANDSHAKE, _CLIENT_HELLO, _SERVER_NAME, _HOST_NAME = 22, 1, 0, 0


class NotTls(ValueError):
    """These bytes do not begin a TLS connection that names its server."""


@dataclass(slots=True)
class _Reader:
    data: bytes
    at: int = 0

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes. Raises NotTls where there are fewer."""
        if self.at + count > len(self.data):
            raise NotTls("a length points beyond the ClientHello")
        self.at += count
        return self.data[self.at - count : self.at]

    def number(self, nbytes: int) -> int:
        """A big-endian number."""
        return int.from_bytes(self.take(nbytes), "big")

    def part(self, length_bytes: int) -> _Reader:
        """What a length of that many bytes stands before."""
        return _Reader(self.take(self.number(length_bytes)))

    @property
    def empty(self) -> bool:
        return self.at == len(self.data)


def server_name(data: bytes) -> str | None:
    """The name, in lower case, that a connection beginning with ``data`` asks for; None while more bytes are needed.

    Raises NotTls for anything else: no TLS, no name, or a ClientHello of more than 16 KiB.
    """
    handshake = b""
    at = 0
    while True:
        if len(handshake) >= 4:
            if handshake[0] != _CLIENT_HELLO:
                raise NotTls("no ClientHello")
            size = 4 + int.from_bytes(handshake[1:4], "big")
            if size > MAX_HELLO_BYTES:
                raise NotTls(f"a ClientHello of {size} bytes, at most {MAX_HELLO_BYTES} are read")
            if len(handshake) >= size:
                return _name_in(_Reader(handshake[4:size]))
        record = data[at : at + 5]
        if record and record[0] != _HANDSHAKE:
            raise NotTls("no TLS handshake")
        if len(record) < 5:
            break
        size = int.from_bytes(record[3:5], "big")
        if not size:
            raise NotTls("an empty record")
        handshake += data[at + 5 : at + 5 + size]
        at += 5 + size
    if len(data) > 2 * MAX_HELLO_BYTES:
        raise NotTls(f"more than {MAX_HELLO_BYTES} bytes without a whole ClientHello")
    return None


def _name_in(hello: _Reader) -> str:
    hello.take(2 + 32)
    for length_bytes in (1, 2, 1):
        hello.part(length_bytes)
    if hello.empty:
        raise NotTls("the ClientHello names no server")
    extensions = hello.part(2)
    while not extensions.empty:
        kind, body = extensions.number(2), extensions.part(2)
        if kind != _SERVER_NAME:
            continue
        names = body.part(2)
        while not names.empty:
            name_kind, name = names.number(1), names.part(2)
            if name_kind == _HOST_NAME:
                try:
                    return name.data.decode("ascii").lower()
                except UnicodeDecodeError:
                    raise NotTls("the server name is not ASCII") from None
    raise NotTls("the ClientHello names no server")
