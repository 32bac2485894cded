"""What a gateway issues certificates with: the intermediate of a folder, read again whenever it was rotated."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cryptography import x509

from gateway.certificates import files
from gateway.certificates.authority import Credential, fingerprint
from gateway.config import ConfigError
from kvcache.node_certificates import CertificateRequest, NodeName


@dataclass(frozen=True, slots=True)
class Issued:
    """A node's certificate with the intermediate that signed it (PEM), and when it ends."""

    chain: bytes
    until: float


class Issuer:
    """Signs nodes' certificates, each for ``seconds``."""

    def __init__(self, folder: Path, seconds: float) -> None:
        """Raises ConfigError for a folder that ``prfaas certs create`` has not made, or that has expired."""
        self._folder = folder
        self._seconds = seconds
        self._seen = self._stamp()
        self._authority, self.roots = self._read()

    @property
    def roots_file(self) -> Path:
        """The bundle of roots that nodes' certificates come from."""
        return self._folder / files.ROOT

    @property
    def root(self) -> bytes:
        """By which fingerprint new join tokens name the root."""
        return fingerprint(self.roots[0])

    @property
    def roots_pem(self) -> bytes:
        """All roots that are believed."""
        return files.pem(*self.roots)

    @property
    def until(self) -> float:
        """When the intermediate ends; nothing that it signs holds longer."""
        return self._authority.until

    def issue(self, name: NodeName, request: CertificateRequest, now: float) -> Issued:
        """Sign what a node asks for. Raises ValueError with an expired intermediate.

        It may well be for a host of the gateway's, where both are on one machine: what tells a gateway's certificate
        from a node's is that it names no node.
        """
        self.refresh()
        certificate = self._authority.node(name, request, now, self._seconds)
        until = certificate.not_valid_after_utc.timestamp()
        return Issued(files.pem(certificate, self._authority.certificate), until)

    def refresh(self) -> None:
        """Take up another intermediate or root that lies in the folder now; one that cannot be read changes nothing."""
        stamp = self._stamp()
        if stamp == self._seen:
            return
        try:
            self._authority, self.roots = self._read()
        except ConfigError:
            return
        self._seen = stamp

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
        if not any(authority.certificate.issuer == root.subject for root in roots):
            raise ConfigError(f"--ca: {files.INTERMEDIATE} in {self._folder} comes from none of the roots beside it")
        return authority, roots
