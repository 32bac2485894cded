"""What ``serve`` tells ``fetch`` beforehand, in a file that only its owner reads.

The key in it signs tickets: whoever has the file may fetch this run's KV from this server, and nothing else anywhere.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from node.bench.kv.party import Subject
from node.config import ConfigError, TlsFiles

MAX_FILE_BYTES = 4 << 20


class Tls(msgspec.Struct, frozen=True):
    """PEM: the run's root, and the fetching side's certificate and key."""

    ca: str
    certificate: str
    key: str


class Credentials(msgspec.Struct, frozen=True):
    """``key`` is the raw Ed25519 key that signs tickets.

    ``kv_digest`` is that of the offered bytes; ``source`` says where they are from: captured or synthetic.
    """

    key: bytes
    node_id: str
    incarnation: str
    public_key: bytes
    subject: Subject
    source: str
    kv_digest: bytes
    tls: Tls | None

    def write(self, path: Path) -> None:
        """Write or replace ``path``, readable by its owner only. Raises OSError."""
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        try:
            with os.fdopen(handle, "wb") as file:
                os.fchmod(file.fileno(), 0o600)
                file.write(msgspec.json.format(msgspec.json.encode(self)))
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise

    @classmethod
    def read(cls, path: Path) -> Credentials:
        """Raises ConfigError naming the cure."""
        try:
            if path.stat().st_size > MAX_FILE_BYTES:
                raise ValueError(f"larger than {MAX_FILE_BYTES} bytes")
            return msgspec.json.decode(path.read_bytes(), type=cls)
        except (OSError, ValueError) as error:
            cure = "give the file that `prfaas bench kv serve` wrote"
            raise ConfigError(f"--credentials: {path} cannot be used: {error}; {cure}") from error


@contextlib.contextmanager
def tls_files(ca: str, certificate: str, key: str) -> Iterator[TlsFiles]:
    """PEM texts as files, for as long as it takes to load them."""
    with tempfile.TemporaryDirectory(prefix="prfaas-bench-") as directory:
        files = TlsFiles(*(Path(directory) / name for name in ("cert.pem", "key.pem", "ca.pem")))
        for path, text in zip((files.cert, files.key, files.ca), (certificate, key, ca), strict=True):
            assert path is not None
            path.touch(0o600)
            path.write_text(text)
        yield files
