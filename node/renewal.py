"""A node's certificate, renewed over its control streams before it ends, and shown by the contexts that are in use."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from kvcache.certificate_files import CertificateFiles
from kvcache.control.renewal import CertificateIssued, RenewCertificate
from node.certificate_request import NotEnrolled
from node.config import ConfigError
from node.enrolment import Certificate, Enrolment

log = logging.getLogger(__name__)

ASK_AGAIN_S = 30.0
LOOK_AGAIN_S = 60.0
"""The wall clock may jump, so nothing sleeps for longer."""


class Renewal:
    """Asks every gateway with an open stream: each ends its stream with the certificate that it knows of."""

    def __init__(
        self,
        enrolment: Enrolment,
        certificate: Certificate,
        shown: CertificateFiles,
        ask: Callable[[RenewCertificate], None],
        anew: Callable[[], Awaitable[Certificate]],
    ) -> None:
        """``shown`` are the contexts that show the files of ``enrolment``; ``ask`` sends to all gateways.

        ``anew`` gets a certificate without one, by the join token.
        """
        self._enrolment = enrolment
        self._certificate = certificate
        self._shown = shown
        self._ask = ask
        self._anew = anew

    async def run(self) -> None:
        """Ask in time, and again where nobody has answered, until cancelled.

        A certificate that has ended opens no stream to renew it over. Raises ConfigError where the token has, too.
        """
        while True:
            left = self._certificate.renewal - time.time()
            if left > 0:
                await asyncio.sleep(min(left, LOOK_AGAIN_S))
                continue
            self._ask(RenewCertificate(self._enrolment.request()))
            life = self._certificate.ends - self._certificate.begins
            await asyncio.sleep(min(ASK_AGAIN_S, life / 20))
            if time.time() >= self._certificate.ends:
                log.warning("certificate has ended; asking for another with the join token")
                self._certificate = await self._anew()
                self._shown.load()

    def refused(self) -> None:
        """A gateway takes the certificate no longer, though it has not ended."""
        self._enrolment.forget()

    def issued(self, answer: CertificateIssued) -> None:
        """Take up what a gateway has issued; what cannot be used leaves all as it was, and is asked for again."""
        if answer.reason:
            log.warning("certificate not renewed reason=%r", answer.reason)
            return
        try:
            self._certificate = self._enrolment.take(answer.chain, answer.roots)
            self._shown.load()
        except (NotEnrolled, ConfigError, OSError) as error:
            log.warning("certificate not renewed reason=%r", str(error))
            return
        log.info("certificate renewed ends_in_s=%.0f", self._certificate.ends - time.time())
