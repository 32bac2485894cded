"""A node's certificate over time: renewed over its streams, and without one where these can't be opened any more."""

from __future__ import annotations

import asyncio
import ssl
import time
from pathlib import Path

import pytest

from gateway.certificates import files
from gateway.certificates.authority import Credential, create_root
from kvcache.certificate_files import CertificateFiles
from kvcache.control.renewal import CertificateIssued, RenewCertificate
from kvcache.node_certificates import CertificateRequest, NodeName
from node import renewal
from node.config import ConfigError
from node.enrolment import Certificate, Enrolment
from node.renewal import Renewal


class Issuing:
    """An authority, and one node's folder."""

    def __init__(self, folder: Path) -> None:
        self.root = create_root("root", time.time(), 1)
        self.below: Credential = self.root.intermediate("below", time.time(), 1)
        self.enrolment = Enrolment(folder, "p1", [])
        self.asked: list[RenewCertificate] = []

    def issued(self, request: bytes, seconds: float) -> CertificateIssued:
        asked = CertificateRequest.parse(request)
        made = self.below.node(NodeName("east", "p1", 0), asked, time.time(), seconds)
        return CertificateIssued(files.pem(made, self.below.certificate), files.pem(self.root.certificate))

    def take(self, seconds: float) -> Certificate:
        issued = self.issued(self.enrolment.request(), seconds)
        return self.enrolment.take(issued.chain, issued.roots)

    async def anew(self) -> Certificate:
        return self.take(3600)

    def renewal(self, certificate: Certificate) -> tuple[Renewal, ssl.SSLContext]:
        shown = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        cert, key, roots = certificate.files.cert, certificate.files.key, certificate.files.ca
        assert cert is not None
        assert key is not None
        followed = CertificateFiles(cert, key, [shown], roots, [shown])
        return Renewal(self.enrolment, certificate, followed, self.asked.append, self.anew), shown


@pytest.fixture
def issuing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Issuing:
    monkeypatch.setattr(renewal, "ASK_AGAIN_S", 0.01)
    return Issuing(tmp_path / "id")


async def test_who_gets_no_answer_asks_again_and_what_is_issued_ends_that(issuing: Issuing) -> None:
    one, shown = issuing.renewal(issuing.take(60))
    running = asyncio.create_task(one.run())
    async with asyncio.timeout(5):
        while len(issuing.asked) < 3:  # noqa: ASYNC110 (it polls state that has no event)
            await asyncio.sleep(0.01)
    one.issued(CertificateIssued(reason="not now"))
    one.issued(CertificateIssued(b"no certificate", b"", ""))
    one.issued(issuing.issued(issuing.enrolment.request(), 3600))
    assert shown.cert_store_stats()["x509_ca"] == 1
    await asyncio.sleep(0.05)
    asked = len(issuing.asked)
    await asyncio.sleep(0.1)
    assert len(issuing.asked) == asked
    running.cancel()


async def test_a_certificate_that_ended_unrenewed_is_replaced_by_the_join_token(issuing: Issuing) -> None:
    one, _ = issuing.renewal(issuing.take(0.01))
    running = asyncio.create_task(one.run())
    async with asyncio.timeout(5):
        while issuing.enrolment.kept("east", time.time() + 100) is None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not running.done()
    running.cancel()


async def test_a_node_ends_where_its_join_token_has_ended_too(issuing: Issuing) -> None:
    async def refused() -> Certificate:
        raise ConfigError("--join-token-file: has expired")

    issuing.anew = refused  # type: ignore[method-assign]
    one, _ = issuing.renewal(issuing.take(0.01))
    async with asyncio.timeout(5):
        with pytest.raises(ConfigError, match="has expired"):
            await one.run()


async def test_what_was_revoked_is_kept_no_longer(issuing: Issuing) -> None:
    one, _ = issuing.renewal(issuing.take(3600))
    assert issuing.enrolment.kept("east", time.time()) is not None
    one.refused()
    assert issuing.enrolment.kept("east", time.time()) is None
