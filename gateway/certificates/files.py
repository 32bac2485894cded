"""Authorities and certificates as PEM files: keys readable by their owner alone, nothing half written.

``root.pem`` and ``root-key.pem`` belong offline; ``intermediate.pem`` with ``intermediate-key.pem`` is what a gateway
needs to issue certificates, beside ``root.pem``, whose bundle may hold an older root while nodes still come under it.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from gateway.certificates.authority import Credential
from kvcache.node_certificates import key_pem

ROOT, ROOT_KEY = "root.pem", "root-key.pem"
INTERMEDIATE, INTERMEDIATE_KEY = "intermediate.pem", "intermediate-key.pem"
GATEWAY, GATEWAY_KEY = "gateway.pem", "gateway-key.pem"


def pem(*certificates: x509.Certificate) -> bytes:
    """A chain or a bundle."""
    return b"".join(one.public_bytes(serialization.Encoding.PEM) for one in certificates)


def write(
    folder: Path, certificate_file: str, key_file: str, chain: Sequence[x509.Certificate], key: Credential
) -> None:
    """Write a certificate with those that signed it, and its key. Raises OSError."""
    _write(folder / key_file, key_pem(key.key), 0o600)
    _write(folder / certificate_file, pem(*chain), 0o644)


def write_bundle(folder: Path, roots: Sequence[x509.Certificate]) -> None:
    """Write the roots that are believed, the newest first. Raises OSError."""
    _write(folder / ROOT, pem(*roots), 0o644)


def read(folder: Path, certificate_file: str, key_file: str) -> Credential:
    """An authority of these files. Raises ValueError, also where key and certificate do not belong together."""
    certificate = read_certificates(folder / certificate_file)[0]
    path = folder / key_file
    try:
        key = serialization.load_pem_private_key(path.read_bytes(), password=None)
    except (OSError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        raise ValueError(f"{path}: not the P-256 key of {certificate_file}")
    return Credential(certificate, key)


def read_certificates(path: Path) -> list[x509.Certificate]:
    """The certificates of a PEM file, at least one. Raises ValueError."""
    try:
        return x509.load_pem_x509_certificates(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _write(path: Path, data: bytes, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
