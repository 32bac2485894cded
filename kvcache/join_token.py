"""A join token: what an operator hands to the nodes of one cluster, as one word that carries all they need to begin.

It names the cluster, holds a secret, and says which root the gateway's certificate must come from, so that a node needs
no other file to know that it speaks with the right gateway. A gateway keeps only the digest of the secret.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import secrets

import msgspec

PREFIX = "prfaas-join."
SECRET_BYTES = 32
ROOT_BYTES = 32
_MOST_CHARS = 512


class JoinToken(msgspec.Struct, frozen=True, array_like=True):
    """``root`` is the SHA-256 of the root certificate (DER), b"" where the gateway issues no certificates."""

    cluster: str
    secret: bytes
    root: bytes = b""

    @classmethod
    def fresh(cls, cluster: str, root: bytes = b"") -> JoinToken:
        """A token with a new secret."""
        return cls(cluster, secrets.token_bytes(SECRET_BYTES), root)

    @classmethod
    def parse(cls, text: str) -> JoinToken:
        """From its one word. Raises ValueError, which tells nothing of the word."""
        body = text.removeprefix(PREFIX)
        try:
            if body == text or len(text) > _MOST_CHARS:
                raise ValueError
            padded = body.encode("ascii") + b"=" * (-len(body) % 4)
            token = msgspec.msgpack.decode(base64.b64decode(padded, altchars=b"-_", validate=True), type=cls)
        except (ValueError, binascii.Error, msgspec.DecodeError):
            raise ValueError("not a join token, or cut short") from None
        if len(token.secret) != SECRET_BYTES or len(token.root) not in (0, ROOT_BYTES):
            raise ValueError("not a join token, or cut short")
        return token

    def __str__(self) -> str:
        return PREFIX + base64.urlsafe_b64encode(msgspec.msgpack.encode(self)).decode().rstrip("=")

    def __repr__(self) -> str:
        return f"JoinToken(cluster={self.cluster!r})"

    @property
    def digest(self) -> bytes:
        """What is kept of the secret: 256 random bits need no slower hash."""
        return hashlib.sha256(self.secret).digest()
