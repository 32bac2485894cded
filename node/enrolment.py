"""How a node comes by its certificate: asked for with the join token, kept in a private folder, renewed in time.

It is over a key that never leaves the node, and the key stays the same when the certificate is renewed.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from kvcache.join_token import PREFIX, JoinToken
from kvcache.node_certificates import NodeName, key_pem, new_key, request_for
from node.backoff import Backoff
from node.certificate_request import NotEnrolled, ask_for_certificate
from node.config import ConfigError, NodeConfig, TlsFiles

log = logging.getLogger(__name__)

CERT, KEY, CA = "node.pem", "node-key.pem", "roots.pem"
RENEW_AT = 2 / 3
"""At which part of its life a certificate is renewed."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """A node's certificate as files, and between which wall-clock times it holds."""

    files: TlsFiles
    name: NodeName
    begins: float
    ends: float

    @property
    def renewal(self) -> float:
        """When to ask for the next one."""
        return self.begins + RENEW_AT * (self.ends - self.begins)


class Enrolment:
    """One node's key and certificate in ``folder``, which nobody else may read."""

    def __init__(self, folder: Path, node_id: str, hosts: Sequence[str]) -> None:
        """``hosts`` are what its KV port is dialled by. Raises ConfigError for a folder that cannot be used."""
        self._folder = folder
        self._node_id = node_id
        self._hosts = tuple(hosts)
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            folder.chmod(0o700)
        except OSError as error:
            raise ConfigError(f"--identity-dir: {folder} cannot be used: {error.strerror}") from error
        self._key = self._kept_key() or new_key()

    @property
    def files(self) -> TlsFiles:
        """Where certificate, key and roots lie once there is a certificate."""
        return TlsFiles(self._folder / CERT, self._folder / KEY, self._folder / CA)

    def request(self) -> bytes:
        """What to send for a new certificate over the same key."""
        return request_for(self._key, self._hosts)

    def kept(self, cluster: str, now: float) -> Certificate | None:
        """The certificate of an earlier run, where it is of this node and key and has not ended."""
        try:
            found = self._load()
        except (OSError, ValueError):
            return None
        mine = (found.name.cluster, found.name.node_id) == (cluster, self._node_id)
        return found if mine and now < found.ends else None

    def forget(self) -> None:
        """Keep the certificate no longer, so that the next start asks for another."""
        with contextlib.suppress(OSError):
            (self._folder / CERT).unlink()

    async def enrol(self, gateway: str, token: JoinToken, text: str) -> Certificate:
        """Ask ``gateway`` (an https URL) for a certificate, showing it the token as ``text``.

        Raises ConfigError for what trying again cannot mend, NotEnrolled otherwise.
        """
        body = {"node_id": self._node_id, "request": base64.b64encode(self.request()).decode()}
        granted = await asyncio.to_thread(ask_for_certificate, gateway, token.root, text, body)
        return self.take(granted.get("certificate", "").encode(), granted.get("roots", "").encode())

    def take(self, chain: bytes, roots: bytes) -> Certificate:
        """Keep a new certificate, with the roots that others' come from (PEM). Raises NotEnrolled for what is none."""
        try:
            first = x509.load_pem_x509_certificates(chain)[0]
            x509.load_pem_x509_certificates(roots)
            if first.public_key() != self._key.public_key():
                raise ValueError("over another key")
            NodeName.of(first)
        except ValueError as error:
            raise NotEnrolled(f"the gateway's answer holds no certificate of this node: {error}") from error
        try:
            for name, data in ((KEY, key_pem(self._key)), (CA, roots), (CERT, chain)):
                _write(self._folder / name, data)
        except OSError as error:
            raise ConfigError(f"--identity-dir: {self._folder}: {error.strerror}") from error
        return self._load()

    def _load(self) -> Certificate:
        first = x509.load_pem_x509_certificates((self._folder / CERT).read_bytes())[0]
        if first.public_key() != self._key.public_key():
            raise ValueError("the certificate is of another key")
        begins, ends = first.not_valid_before_utc.timestamp(), first.not_valid_after_utc.timestamp()
        return Certificate(self.files, NodeName.of(first), begins, ends)

    def _kept_key(self) -> ec.EllipticCurvePrivateKey | None:
        try:
            found = serialization.load_pem_private_key((self._folder / KEY).read_bytes(), password=None)
        except (OSError, ValueError, TypeError):
            return None
        return found if isinstance(found, ec.EllipticCurvePrivateKey) else None


@dataclass(frozen=True, slots=True)
class Enrolled:
    """A node that has a certificate, and what renews it; ``anew`` gets it one as if it had none."""

    enrolment: Enrolment
    certificate: Certificate
    anew: Callable[[], Awaitable[Certificate]]


@contextlib.contextmanager
def identity_folder(operators: Path | None) -> Iterator[Path]:
    """Where key and certificate lie: the operator's folder, or one that goes with the block and all that is in it."""
    if operators is not None:
        yield operators
        return
    with tempfile.TemporaryDirectory(prefix="prfaas-node-") as found:
        yield Path(found)


async def enrolled(config: NodeConfig, folder: Path, gateways: Sequence[str]) -> Enrolled | None:
    """The certificate that a node's join token gets it, or that it got before; None for a token without a root.

    It lies in ``folder``. Waits for as long as no gateway answers. Raises ConfigError for what waiting does not mend.
    """
    text = config.join_token or ""
    if not text.startswith(PREFIX):
        return None
    try:
        token = JoinToken.parse(text)
    except ValueError as error:
        raise ConfigError(f"--join-token-file: {error}") from error
    if token.cluster != config.cluster:
        raise ConfigError(f"--cluster: the join token is of cluster {token.cluster!r}, not {config.cluster!r}")
    if not token.root:
        return None
    port = config.kv_port
    hosts = [] if port is None else [port.advertise.host if port.advertise is not None else port.host]
    enrolment = Enrolment(folder, config.node_id, hosts)

    def anew() -> Awaitable[Certificate]:
        return _from_any(gateways, enrolment, token, text)

    kept = enrolment.kept(config.cluster, time.time())
    return Enrolled(enrolment, await anew() if kept is None else kept, anew)


async def _from_any(gateways: Sequence[str], enrolment: Enrolment, token: JoinToken, text: str) -> Certificate:
    """Ask one gateway after the other until one has answered. Raises ConfigError."""
    backoff = Backoff(0.5, 10.0)
    while True:
        for gateway in gateways:
            try:
                return await enrolment.enrol(gateway.rstrip("/"), token, text)
            except NotEnrolled as error:
                delay = backoff.next_delay()
                log.warning("no certificate yet gateway=%s cause=%r retry_in=%.1fs", gateway, str(error), delay)
                await asyncio.sleep(delay)


def _write(path: Path, data: bytes) -> None:
    scratch = path.with_name(f".{path.name}.new")
    handle = os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)
    os.replace(scratch, path)
