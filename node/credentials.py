"""What a node shows of itself and whom it trusts, by TLS: made from its files at the start, then kept fresh."""

from __future__ import annotations

import logging
import ssl
from collections.abc import Callable, Coroutine
from typing import Any

from kvcache.certificate_files import CertificateFiles
from kvcache.control.renewal import CertificateIssued, RenewCertificate
from node.config import NodeConfig
from node.enrolment import Enrolled
from node.renewal import Renewal
from node.tls import (
    certificate_told,
    dialling_context,
    gateway_context,
    listening_context,
    operators_certificate,
)

log = logging.getLogger(__name__)


class Credentials:
    """Of one node: ``gateway`` for control streams, ``listen`` and ``dial`` for KV; None where there is no TLS.

    With ``enrolled`` there is a certificate of the gateway's own making, which is renewed over the control streams:
    ``ask`` sends to all of them. Raises ConfigError for files that cannot be used.
    """

    def __init__(self, config: NodeConfig, enrolled: Enrolled | None, ask: Callable[[RenewCertificate], None]) -> None:
        own = None if enrolled is None else enrolled.enrolment.files
        kv_files = config.kv_tls if own is None or config.kv_tls.complete else own
        self.gateway = gateway_context(config.gateway_ca, own)
        self.listen, self.dial = listening_context(kv_files), dialling_context(kv_files)
        self.renewal = None if enrolled is None else self._renewing(config, enrolled, ask)
        self._kv_certificate = operators_certificate(config.kv_tls, self.listen, self.dial)
        self.join_token = config.join_token if self.renewal is None else None
        """What control streams show; None where the certificate says it all."""

    def works(self) -> list[Coroutine[Any, Any, None]]:
        """What keeps them fresh, each to run until it is cancelled."""
        works = [] if self.renewal is None else [self.renewal.run()]
        if self._kv_certificate is not None:
            works.append(self._kv_certificate.follow(certificate_told))
        return works

    def reload(self) -> None:
        """Take the KV port's certificate anew, without waiting for its files to be seen to change."""
        if self._kv_certificate is None:
            log.info("nothing to reload: no --kv-tls-cert")
            return
        try:
            self._kv_certificate.load()
        except OSError as error:
            certificate_told(error)
        else:
            certificate_told(None)

    def issued(self, answer: CertificateIssued) -> None:
        """A gateway answers what was asked of it."""
        if self.renewal is not None:
            self.renewal.issued(answer)

    def refused(self) -> None:
        """A gateway takes the certificate no longer, though it has not ended."""
        if self.renewal is not None:
            self.renewal.refused()

    def _renewing(self, config: NodeConfig, enrolled: Enrolled, ask: Callable[[RenewCertificate], None]) -> Renewal:
        """Keeps the certificate, and shows it wherever it was shown first."""
        files = enrolled.enrolment.files
        assert files.cert is not None
        assert files.key is not None
        peers = [] if config.kv_tls.complete else [self.listen, self.dial]
        trusting = peers if config.gateway_ca is not None else [self.gateway, *peers]
        shown = CertificateFiles(files.cert, files.key, _made([self.gateway, *peers]), files.ca, _made(trusting))
        return Renewal(enrolled.enrolment, enrolled.certificate, shown, ask, enrolled.anew)


def _made(contexts: list[ssl.SSLContext | None]) -> list[ssl.SSLContext]:
    return [context for context in contexts if context is not None]
