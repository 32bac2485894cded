"""A certificate and its key on disk, shown by TLS contexts that take new ones while they are in use.

Connections that are open keep what they were begun with; whoever connects afterwards meets the new certificate. New
roots are trusted beside the old ones: a context can be told to trust more, but not less.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Sequence
from pathlib import Path

LOOK_EVERY_S = 5.0

Stamp = tuple[tuple[int, int, int] | None, ...]


class CertificateFiles:
    """PEM files ``cert`` and ``key``, which are loaded into ``contexts`` already, and ``roots`` into ``trusting``."""

    def __init__(
        self,
        cert: Path,
        key: Path,
        contexts: Sequence[ssl.SSLContext],
        roots: Path | None = None,
        trusting: Sequence[ssl.SSLContext] = (),
    ) -> None:
        self._cert = cert
        self._key = key
        self._contexts = tuple(contexts)
        self._roots = roots
        self._trusting = tuple(trusting)
        self._seen = self._stamp()

    def load(self, cert: Path | None = None, key: Path | None = None) -> None:
        """Show what the files hold now, or other files. Raises OSError where they cannot be used, and changes nothing.

        ssl.SSLError is one: a key that belongs to another certificate.
        """
        cert, key = cert or self._cert, key or self._key
        trial = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        trial.load_cert_chain(cert, key)
        if self._roots is not None:
            trial.load_verify_locations(self._roots)
        for context in self._contexts:
            context.load_cert_chain(cert, key)
        for context in self._trusting:
            context.load_verify_locations(self._roots)
        self._cert, self._key = cert, key
        self._seen = self._stamp()

    async def follow(self, told: Callable[[OSError | None], None], every_s: float = LOOK_EVERY_S) -> None:
        """Load the files whenever they have changed, until cancelled. ``told`` hears of each time, and why it failed.

        Two files are never replaced at once, so what does not fit is looked at again when one of them changes.
        """
        while True:
            await asyncio.sleep(every_s)
            stamp = self._stamp()
            if stamp == self._seen:
                continue
            self._seen = stamp
            try:
                self.load()
            except OSError as error:
                told(error)
            else:
                told(None)

    def _stamp(self) -> Stamp:
        return tuple(_stamp(path) for path in (self._cert, self._key, self._roots) if path is not None)


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_ino, found.st_size, found.st_mtime_ns
