"""Certificates that TLS itself refuses never come near the application: they are counted where they fail."""

from __future__ import annotations

import ssl

from gateway.joining.refusals import Cause, Refusals, TurnedAway


def count_refused(context: ssl.SSLContext, refusals: Refusals) -> None:
    """Have every handshake of ``context`` that fails over the client's certificate told to ``refusals``."""

    class Counting(ssl.SSLObject):
        def do_handshake(self) -> None:
            try:
                super().do_handshake()
            except ssl.SSLCertVerificationError as error:
                refusals.add("unknown", "", TurnedAway(Cause.CERTIFICATE_REFUSED, error.verify_message))
                raise

    context.sslobject_class = Counting
