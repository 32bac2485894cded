"""A root that stays offline, intermediates that it signs, and the certificates of gateways and nodes under those.

All keys are P-256. Times are wall-clock seconds since the epoch, handed in.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from kvcache.node_certificates import CertificateRequest, NodeName, host_name, new_key

DAY_S = 86400.0
SKEW_S = 300.0
"""How much earlier than its issue a certificate holds: clocks of other machines may be late by this."""


class AuthorityExpired(ValueError):
    """What would sign has ended, or ends right now."""


@dataclass(frozen=True, slots=True)
class Credential:
    """A certificate with its key: a root, an intermediate or a gateway's own."""

    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey = field(repr=False)

    @property
    def until(self) -> float:
        """When it ends."""
        return self.certificate.not_valid_after_utc.timestamp()

    def intermediate(self, name: str, now: float, days: float) -> Credential:
        """One that this root signs and that signs certificates of gateways and nodes, but no further authority."""
        key = new_key()
        builder = _builder(name, self, key.public_key(), now, days * DAY_S)
        return Credential(_authority(builder, 0).sign(self.key, hashes.SHA256()), key)

    def server(self, hosts: Sequence[str], now: float, days: float) -> Credential:
        """A gateway's certificate with its key. Raises ValueError for what is no host name, or without any."""
        if not hosts:
            raise ValueError("a gateway's certificate needs a host name or an address")
        key = new_key()
        names = [_server_name(host) for host in hosts]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH]
        return Credential(_leaf(hosts[0][:64], self, key.public_key(), names, usages, now, days * DAY_S), key)

    def node(self, name: NodeName, request: CertificateRequest, now: float, seconds: float) -> x509.Certificate:
        """A node's certificate over the key that it asked with, for both ends of a connection."""
        names = [x509.UniformResourceIdentifier(name.uri), *(host_name(host) for host in request.hosts)]
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        return _leaf(name.node_id, self, request.public_key, names, usages, now, seconds)


def create_root(name: str, now: float, days: float) -> Credential:
    """A root of one's own, which signs itself."""
    key = new_key()
    builder = _builder(name, None, key.public_key(), now, days * DAY_S)
    return Credential(_authority(builder, 1).sign(key, hashes.SHA256()), key)


def fingerprint(certificate: x509.Certificate) -> bytes:
    """The SHA-256 by which a join token names a root."""
    return hashlib.sha256(certificate.public_bytes(serialization.Encoding.DER)).digest()


def _server_name(host: str) -> x509.GeneralName:
    """A host, or all hosts right below a domain, as in ``*.gateways.example.org``."""
    if not host.startswith("*."):
        return host_name(host)
    host_name(host[2:])
    return x509.DNSName(host)


def _builder(
    name: str, issuer: Credential | None, key: ec.EllipticCurvePublicKey, now: float, seconds: float
) -> x509.CertificateBuilder:
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    until = now + seconds if issuer is None else min(now + seconds, issuer.until)
    if until <= now:
        raise AuthorityExpired("the authority that would sign this has expired; rotate it with `prfaas certs rotate`")
    signer = key if issuer is None else issuer.key.public_key()
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if issuer is None else issuer.certificate.subject)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(datetime.fromtimestamp(now - SKEW_S, UTC))
        .not_valid_after(datetime.fromtimestamp(until, UTC))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
    )


def _authority(builder: x509.CertificateBuilder, below: int) -> x509.CertificateBuilder:
    """Make it one of an authority with at most ``below`` authorities under it."""
    return builder.add_extension(x509.BasicConstraints(ca=True, path_length=below), critical=True).add_extension(
        _usage(signs_certificates=True), critical=True
    )


def _leaf(
    common_name: str,
    issuer: Credential,
    key: ec.EllipticCurvePublicKey,
    names: Sequence[x509.GeneralName],
    usages: Sequence[x509.ObjectIdentifier],
    now: float,
    seconds: float,
) -> x509.Certificate:
    return (
        _builder(common_name, issuer, key, now, seconds)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage(usages), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .sign(issuer.key, hashes.SHA256())
    )


def _usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )
