"""What a gateway issues certificates with: the intermediate of a folder, read again whenever it was rotated."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature

from gateway.certificates import files
from gateway.certificates.authority import AuthorityExpired, Credential, fingerprint
from gateway.config import ConfigError
from kvcache.node_certificates import CertificateRequest, NodeName

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Issued:
    """A node's certificate with the intermediate that signed it (PEM), and when it ends."""

    chain: bytes
    until: float


class Issuer:
    """Signs nodes' certificates, each for ``seconds``."""

    def __init__(self, folder: Path, seconds: float) -> None:
        """Raises ConfigError for a folder that lacks something, or whose parts do not belong together."""
        self._folder = folder
        self._seconds = seconds
        self._seen = self._told = self._stamp()
        self._authority, self.roots = self._read()

    @property
    def root(self) -> bytes:
        """By which fingerprint new join tokens name the root: the one that the gateway's own certificate comes from."""
        self.refresh()
        return fingerprint(_signer(self._authority.certificate, self.roots))

    @property
    def roots_pem(self) -> bytes:
        """All roots that are believed."""
        self.refresh()
        return files.pem(*self.roots)

    @property
    def believed(self) -> tuple[str, ...]:
        """Fingerprints of all roots that are believed, in hexadecimal."""
        self.refresh()
        return tuple(fingerprint(root).hex() for root in self.roots)

    @property
    def until(self) -> float:
        """When the intermediate ends; nothing that it signs holds longer."""
        return self._authority.until

    def issue(self, name: NodeName, request: CertificateRequest, now: float) -> Issued:
        """Sign what a node asks for. Raises AuthorityExpired with an intermediate that has ended.

        It may well be for a host of the gateway's, where both are on one machine: what tells a gateway's certificate
        from a node's is that it names no node.
        """
        self.refresh()
        try:
            certificate = self._authority.node(name, request, now, self._seconds)
        except AuthorityExpired as error:
            log.error("no certificate for %s: %s", name.uri, error)
            raise
        until = certificate.not_valid_after_utc.timestamp()
        return Issued(files.pem(certificate, self._authority.certificate), until)

    def refresh(self) -> None:
        """Take up another intermediate or root that lies in the folder now; one that cannot be read changes nothing."""
        stamp = self._stamp()
        if stamp == self._seen:
            return
        try:
            self._authority, self.roots = self._read()
        except ConfigError as error:
            if stamp != self._told:
                log.error("certificates not replaced: %s", error)
            self._told = stamp
            return
        self._seen = stamp
        log.info("authority replaced roots=%d", len(self.roots))

    def _stamp(self) -> tuple[int, ...]:
        names = (files.INTERMEDIATE, files.INTERMEDIATE_KEY, files.ROOT)
        try:
            return tuple((self._folder / name).stat().st_mtime_ns for name in names)
        except OSError:
            return ()

    def _read(self) -> tuple[Credential, list[x509.Certificate]]:
        try:
            authority = files.read(self._folder, files.INTERMEDIATE, files.INTERMEDIATE_KEY)
            roots = files.read_certificates(self._folder / files.ROOT)
        except ValueError as error:
            raise ConfigError(f"--ca: {error}; make the folder with `prfaas certs create`") from error
        try:
            _signer(authority.certificate, roots)
        except ValueError as error:
            raise ConfigError(f"--ca: {files.INTERMEDIATE} in {self._folder} {error}") from error
        return authority, roots


def _signer(certificate: x509.Certificate, roots: Sequence[x509.Certificate]) -> x509.Certificate:
    """Which of the roots, that may all have one name, has signed this. Raises ValueError."""
    for root in roots:
        with contextlib.suppress(ValueError, TypeError, InvalidSignature):
            certificate.verify_directly_issued_by(root)
            return root
    raise ValueError("comes from none of the roots beside it")
