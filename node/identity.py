"""Who this node is, for as long as its process lives: a name, an incarnation and a key pair that never leave memory."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


@dataclass(frozen=True, slots=True)
class Identity:
    """``incarnation`` differs for every start, so that nothing cached for an earlier process applies to this one."""

    node_id: str
    incarnation: str
    key: Ed25519PrivateKey = field(repr=False)

    @classmethod
    def fresh(cls, node_id: str) -> Identity:
        """A new incarnation with a new key."""
        return cls(node_id, secrets.token_hex(8), Ed25519PrivateKey.generate())

    @property
    def public_key(self) -> bytes:
        """The raw Ed25519 public key, 32 bytes."""
        return self.key.public_key().public_bytes_raw()
