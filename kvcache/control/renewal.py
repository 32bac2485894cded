"""How a node renews its certificate over the control stream that the old one opened."""

from __future__ import annotations

import msgspec


class RenewCertificate(msgspec.Struct, frozen=True, tag=True):
    """A PKCS #10 request in DER for the certificate of the node that sends it. Only for gateways that issued one."""

    request: bytes


class CertificateIssued(msgspec.Struct, frozen=True, tag=True):
    """The new certificate with its intermediate, and the roots that others' come from (PEM).

    ``reason`` says why there is none; the stream ends when the old one does.
    """

    chain: bytes = b""
    roots: bytes = b""
    reason: str = ""
