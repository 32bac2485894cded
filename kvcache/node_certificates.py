"""Certificates of nodes: how one names its node, and how a node asks for one.

The name is a URI in the certificate, ``prfaas://CLUSTER/NODE?epoch=N``. Whoever revokes a cluster's certificates raises
the cluster's epoch: those of an earlier one are then refused, without a list of them all.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from dataclasses import dataclass

from cryptography import x509
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

NODE_SCHEME = "prfaas://"
MAX_HOSTS = 8
MAX_REQUEST_BYTES = 16 << 10
_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}"
_URI = re.compile(rf"prfaas://({_NAME})/({_NAME})\?epoch=(0|[1-9][0-9]{{0,8}})")
_LABEL = r"[A-Za-z0-9_][A-Za-z0-9_-]{0,62}"
_DNS = re.compile(rf"{_LABEL}(?:\.{_LABEL})*\.?")
_MOST_DNS_CHARS = 253


@dataclass(frozen=True, slots=True)
class NodeName:
    """Which node a certificate is of."""

    cluster: str
    node_id: str
    epoch: int

    @property
    def uri(self) -> str:
        """As a certificate says it."""
        return f"prfaas://{self.cluster}/{self.node_id}?epoch={self.epoch}"

    @classmethod
    def of(cls, certificate: x509.Certificate) -> NodeName:
        """Raises ValueError for a certificate that does not name exactly one node."""
        try:
            names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            raise ValueError("the certificate names no node") from None
        found = [_URI.fullmatch(uri) for uri in names.get_values_for_type(x509.UniformResourceIdentifier)]
        if len(found) != 1 or found[0] is None:
            raise ValueError("the certificate names no node")
        cluster, node_id, epoch = found[0].groups()
        return cls(cluster, node_id, int(epoch))


@dataclass(frozen=True, slots=True)
class CertificateRequest:
    """What a node asks for: a certificate over its own key, for the names and addresses that its KV port has."""

    public_key: ec.EllipticCurvePublicKey
    hosts: tuple[str, ...]

    @classmethod
    def parse(cls, der: bytes) -> CertificateRequest:
        """From a PKCS #10 request in DER, whose signature proves the key. Raises ValueError."""
        if len(der) > MAX_REQUEST_BYTES:
            raise ValueError(f"request: more than {MAX_REQUEST_BYTES} bytes")
        try:
            request = x509.load_der_x509_csr(der)
            key, proved = request.public_key(), request.is_signature_valid
        except (ValueError, UnsupportedAlgorithm, InvalidSignature, x509.InvalidVersion) as error:
            raise ValueError("request: no PKCS #10 request in DER") from error
        if not proved or not isinstance(key, ec.EllipticCurvePublicKey) or not isinstance(key.curve, ec.SECP256R1):
            raise ValueError("request: must be signed by its own P-256 key")
        try:
            names = request.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        except x509.ExtensionNotFound:
            return cls(key, ())
        except (ValueError, x509.DuplicateExtension, x509.UnsupportedGeneralNameType) as error:
            raise ValueError("request: its names cannot be read") from error
        hosts = [str(name.value) for name in names if isinstance(name, x509.DNSName | x509.IPAddress)]
        if len(hosts) > MAX_HOSTS:
            raise ValueError(f"request: at most {MAX_HOSTS} host names")
        for host in hosts:
            host_name(host)
        return cls(key, tuple(hosts))


def host_name(host: str) -> x509.GeneralName:
    """A host as a certificate names it. Raises ValueError for what is neither an address nor a plain DNS name."""
    try:
        return x509.IPAddress(ipaddress.ip_address(host.strip("[]")))
    except ValueError:
        pass
    if len(host) > _MOST_DNS_CHARS or not _DNS.fullmatch(host):
        raise ValueError(f"{host[:80]!r} is neither an address nor a host name")
    return x509.DNSName(host)


def new_key() -> ec.EllipticCurvePrivateKey:
    """A key for TLS: P-256, which every TLS library takes."""
    return ec.generate_private_key(ec.SECP256R1())


def request_for(key: ec.EllipticCurvePrivateKey, hosts: Sequence[str]) -> bytes:
    """A request in DER for a certificate over ``key``. Raises ValueError for what is no host name."""
    builder = x509.CertificateSigningRequestBuilder().subject_name(
        x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "prfaas node")])
    )
    if hosts:
        names = x509.SubjectAlternativeName([host_name(host) for host in hosts])
        builder = builder.add_extension(names, critical=False)
    return builder.sign(key, hashes.SHA256()).public_bytes(serialization.Encoding.DER)


def key_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """The key as unencrypted PKCS #8."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
