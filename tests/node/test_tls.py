"""Mutual TLS on the KV port, and the operator's own root on the control stream."""

import asyncio
import datetime
import ipaddress

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from kvcache.control import KvAddress
from kvcache.transport import Expected, KvEndpoint, LocalIdentity, PeerRefused, PeerUnreachable
from kvcache.wire import Role
from node.config import ConfigError, TlsFiles
from node.tls import dialling_context, gateway_context, listening_context, operators_certificate
from tests.node.fake_gateway import FakeGateway
from tests.node.test_control import running


async def serial(trusting, port):
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting, server_hostname="127.0.0.1")
    found = writer.get_extra_info("peercert")["serialNumber"]
    writer.close()
    return found


class Root:
    """A certificate authority in a directory."""

    names = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1")), x509.DNSName("localhost")])

    def __init__(self, directory):
        self.directory = directory
        directory.mkdir()
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, directory.name)])
        self.ca = directory / "ca.pem"
        self.ca.write_bytes(self._sign(self.name, self.key, True).public_bytes(serialization.Encoding.PEM))

    def files(self, name="node"):
        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._sign(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]), key, False)
        cert_file, key_file = self.directory / f"{name}.pem", self.directory / f"{name}.key"
        cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        plain = serialization.NoEncryption()
        key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, plain))
        return TlsFiles(cert_file, key_file, self.ca)

    def _sign(self, subject, key, authority):
        now = datetime.datetime.now(datetime.UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(subject)
            .issuer_name(self.name)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(authority, None), critical=True)
            .add_extension(self.names, critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self.key.public_key()), False)
            .add_extension(x509.KeyUsage(True, False, False, False, False, authority, authority, False, False), True)
            .sign(self.key, hashes.SHA256())
        )


class Deaf:
    """A frame handler that nobody speaks to."""

    def on_frame(self, peer, frame):
        raise AssertionError(frame)

    def payload_target(self, peer, data):
        return None

    def on_data(self, peer, data):
        raise AssertionError(data)

    def on_broken(self, peer, connection, unfinished):
        pass

    def on_lost(self, peer, cause):
        pass


def endpoint(name, key=None, dial_ssl=None):
    key = key or Ed25519PrivateKey.generate()
    return KvEndpoint(LocalIdentity(name, "1", key, "f", lambda: Role.PREFILL), Deaf(), dial_ssl)


async def reach(listening, dialling, seconds=1.0):
    """Listen with one side's files, dial with the other's."""
    key = Ed25519PrivateKey.generate()
    wanted = Expected("server", "1", key.public_key().public_bytes_raw())
    server, client = endpoint("server", key), endpoint("client", dial_ssl=dialling_context(dialling))
    try:
        port = await server.listen("127.0.0.1", 0, listening_context(listening))
        deadline = asyncio.get_running_loop().time() + seconds
        peer = await client.peer(wanted, KvAddress("127.0.0.1", port), deadline)
        return peer.identity.node_id
    finally:
        await client.close()
        await server.close()


@pytest.fixture
def root(tmp_path):
    return Root(tmp_path / "root")


async def test_nodes_under_one_root_reach_each_other(root):
    assert await reach(root.files("server"), root.files("client")) == "server"


@pytest.mark.parametrize("dialler", ["no certificate", "another root", "no tls"])
async def test_a_node_that_does_not_show_a_certificate_under_the_root_is_turned_away(root, tmp_path, dialler):
    foreign = Root(tmp_path / "foreign").files()
    files = {
        "no certificate": TlsFiles(ca=root.ca),
        "another root": TlsFiles(foreign.cert, foreign.key, root.ca),
        "no tls": TlsFiles(),
    }
    with pytest.raises((PeerUnreachable, PeerRefused)):
        await reach(root.files(), files[dialler])


async def test_a_port_under_another_root_is_not_trusted(root, tmp_path):
    with pytest.raises(PeerRefused, match="certificate"):
        await reach(Root(tmp_path / "foreign").files(), root.files())


def test_files_that_are_no_certificates_are_named(root, tmp_path):
    rubbish = tmp_path / "rubbish"
    rubbish.write_text("x")
    with pytest.raises(ConfigError, match="--kv-tls-ca"):
        dialling_context(TlsFiles(ca=rubbish))
    with pytest.raises(ConfigError, match="--gateway-ca"):
        gateway_context(rubbish)
    assert listening_context(TlsFiles()) is None
    assert dialling_context(TlsFiles()) is None
    assert gateway_context(None) is None


async def test_the_control_stream_trusts_the_operators_root_and_no_other(root):
    gateway = FakeGateway()
    gateway.tls = listening_context(root.files("gateway"))
    gateway.tls.verify_mode = gateway.tls.verify_mode.CERT_NONE
    async with gateway:
        async with running(gateway, tls=gateway_context(root.ca)) as (_, stream, _):
            await gateway.until(lambda: stream.joined)
        async with running(gateway) as (_, stream, _):
            await asyncio.sleep(0.3)
            assert not stream.joined


async def test_a_replaced_certificate_is_shown_by_the_kv_port_and_by_dials(tmp_path):
    root = Root(tmp_path / "root")
    files, peer = root.files("node"), root.files("peer")
    listening, dialling = listening_context(files), dialling_context(files)
    certificate = operators_certificate(files, listening, dialling)
    seen = []

    async def accept(reader, writer):
        seen.append(writer.get_extra_info("peercert")["serialNumber"])
        writer.close()

    async with (
        await asyncio.start_server(accept, "127.0.0.1", 0, ssl=listening) as mine,
        await asyncio.start_server(accept, "127.0.0.1", 0, ssl=listening_context(peer)) as theirs,
    ):
        ports = [server.sockets[0].getsockname()[1] for server in (mine, theirs)]
        before = await serial(dialling_context(peer), ports[0])
        await serial(dialling, ports[1])
        root.files("node")
        certificate.load()
        after = await serial(dialling_context(peer), ports[0])
        await serial(dialling, ports[1])
        async with asyncio.timeout(5):
            while len(seen) < 4:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    assert before != after
    assert {before, after} <= set(seen)
    assert operators_certificate(TlsFiles(), listening) is None
