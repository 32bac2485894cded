"""The way to Redis, where the client library is at odds with asyncio."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from redis.asyncio import Redis

from deploy.stack import free_port
from gateway.shared.link import RedisAway, RedisLink
from gateway.shared.redis_url import parse_redis
from tests.redis_server import needs_redis, running_redis


async def test_whoever_is_cancelled_ends_though_the_client_makes_an_error_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def breaks(*_: Any) -> None:
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            raise ConnectionError("reset") from None

    monkeypatch.setattr(Redis, "execute_command", breaks)
    task = asyncio.create_task(RedisLink(parse_redis("redis://127.0.0.1:1/0")).command("PING"))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task], timeout=5)
    assert task.cancelled()


def self_signed(folder: Path, address: str) -> Path:
    """A certificate for an address, and its key beside it."""
    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([])
    now, day = datetime.datetime.now(datetime.UTC), datetime.timedelta(days=1)
    hosts = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address(address))])
    made = x509.CertificateBuilder(name, name, key.public_key(), 1, now - day, now + day)
    folder.mkdir()
    file = folder / "cert.pem"
    file.write_bytes(made.add_extension(hosts, critical=True).sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    plain = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    file.with_name("key.pem").write_bytes(plain)
    return file


@pytest.fixture
def certificate(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    return self_signed(tmp_path / "server", getattr(request, "param", "127.0.0.1"))


@pytest.fixture
def secured(certificate: Path) -> Iterator[str]:
    port = str(free_port())
    files = ("--tls-cert-file", str(certificate), "--tls-key-file", str(certificate.with_name("key.pem")))
    with running_redis("--tls-port", port, *files, "--tls-auth-clients", "no", "--requirepass", "secret"):
        yield f"rediss://127.0.0.1:{port}/0"


async def asked(url: str, ca: Path | None, password: str = "secret") -> Any:
    link = RedisLink(parse_redis(url, environment_password=password, ca=ca))
    try:
        return await link.together(("SET", "a", "b"), ("GET", "a"))
    finally:
        await link.close()


@needs_redis
async def test_a_redis_behind_tls_is_spoken_to_if_its_root_is_the_named_one(
    secured: str, certificate: Path, tmp_path: Path
) -> None:
    assert (await asked(secured, certificate))[1] == b"b"
    for ca in (None, self_signed(tmp_path / "other", "127.0.0.1")):
        with pytest.raises(RedisAway, match="CERTIFICATE_VERIFY_FAILED"):
            await asked(secured, ca)
    with pytest.raises(RedisAway, match="invalid username-password pair") as away:
        await asked(secured, certificate, "guessed")
    assert "guessed" not in str(away.value)


@needs_redis
@pytest.mark.parametrize("certificate", ["127.0.0.2"], indirect=True)
async def test_a_redis_that_is_another_than_its_certificate_says_is_refused(secured: str, certificate: Path) -> None:
    with pytest.raises(RedisAway, match="CERTIFICATE_VERIFY_FAILED"):
        await asked(secured, certificate)
