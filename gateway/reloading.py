"""Reading the configuration and the certificate again while the gateway runs: all of it is taken, or nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable

from gateway.config import ConfigError, GatewayConfig
from gateway.live import Change, LiveConfig
from kvcache.certificate_files import CertificateFiles

log = logging.getLogger(__name__)


class Reloading:
    """``reread`` parses what the gateway was started with, and its file as it is by then. Raises ConfigError."""

    def __init__(
        self, live: LiveConfig, reread: Callable[[], GatewayConfig], certificate: CertificateFiles | None
    ) -> None:
        self._live = live
        self._reread = reread
        self._certificate = certificate

    def __call__(self) -> list[Change]:
        """Take what is new, the certificate too. Raises ConfigError, saying why nothing was changed."""
        try:
            new = self._reread()
            changes = self._live.check(new)
            self._load_certificate(new)
        except ConfigError as error:
            log.error("not reloaded: %s", error)
            raise
        self._live.take(new)
        log.info("reloaded changed=%s", [change.option for change in changes])
        return changes

    async def follow_certificate(self) -> None:
        """Load the certificate whenever its files change, until cancelled."""
        if self._certificate is not None:
            await self._certificate.follow(_told)

    def _load_certificate(self, new: GatewayConfig) -> None:
        if self._certificate is None:
            return
        try:
            self._certificate.load(new.tls_cert, new.tls_key)
        except OSError as error:  # ssl.SSLError is one
            raise ConfigError(f"--tls-cert {new.tls_cert}, --tls-key {new.tls_key}: {error}") from error


def _told(error: OSError | None) -> None:
    if error is None:
        log.info("certificate replaced")
    else:
        log.error("certificate not replaced, the files do not go together: %s", error)
