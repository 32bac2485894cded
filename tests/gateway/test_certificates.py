import os
import ssl
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from cryptography import x509

from gateway.certificates import files
from gateway.certificates.authority import Credential, create_root, fingerprint
from gateway.certificates.issuer import Issuer
from gateway.commands.certs import certs
from gateway.config import ConfigError
from kvcache.node_certificates import CertificateRequest, NodeName, key_pem, new_key, request_for

NOW = time.time()
EAST = NodeName("east", "p1", 3)


@pytest.fixture
def made(tmp_path: Path) -> Path:
    run("create", tmp_path)
    return tmp_path


def run(command: str, folder: Path, *more: str, code: int = 0) -> str:
    where = [
        "--root",
        str(folder / "offline"),
        "--out",
        str(folder / "ca"),
        "--host",
        "gw.example.org",
        "--host",
        "127.0.0.1",
    ]
    done = CliRunner().invoke(certs, [command, *where, *more])
    assert done.exit_code == code, done.output
    return done.output


def node_files(folder: Path, issuer: Issuer, name: NodeName = EAST, hosts: tuple[str, ...] = ("kv.east",)) -> Path:
    key = new_key()
    issued = issuer.issue(name, CertificateRequest.parse(request_for(key, hosts)), time.time())
    path = folder / f"{name.node_id}-{name.cluster}.pem"
    path.write_bytes(issued.chain + key_pem(key))
    return path


def handshake(roots: Path, server: tuple[Path, Path | None], client: Path | None, host: str) -> ssl.SSLObject:
    """A TLS handshake in memory; the server's side of it. Raises ssl.SSLError where either side refuses."""
    serving = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving.load_cert_chain(*server)
    serving.load_verify_locations(roots)
    serving.verify_mode = ssl.CERT_OPTIONAL
    dialling = ssl.create_default_context(cafile=str(roots))
    if client is not None:
        dialling.load_cert_chain(client)
    a, b = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = dialling.wrap_bio(a, b, server_hostname=host), serving.wrap_bio(b, a, server_side=True)
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return ends[1]


def test_one_command_makes_all_that_a_gateway_needs(made: Path) -> None:
    ca = made / "ca"
    server = handshake(ca / files.ROOT, (ca / files.GATEWAY, ca / files.GATEWAY_KEY), None, "gw.example.org")
    assert server.version() == "TLSv1.3"
    for folder, key in (("offline", files.ROOT_KEY), ("ca", files.INTERMEDIATE_KEY), ("ca", files.GATEWAY_KEY)):
        assert os.stat(made / folder / key).st_mode & 0o777 == 0o600


def test_the_root_s_key_is_not_among_what_a_gateway_gets(made: Path) -> None:
    assert sorted(os.listdir(made / "ca")) == [
        files.GATEWAY_KEY, files.GATEWAY, files.INTERMEDIATE_KEY, files.INTERMEDIATE, files.ROOT,
    ]  # fmt: skip


def test_a_second_root_is_not_made_over_the_first(made: Path) -> None:
    assert "prfaas certs rotate" in run("create", made, code=2)


def test_a_node_s_certificate_serves_both_ends_and_says_which_node_it_is(made: Path) -> None:
    ca = made / "ca"
    node = node_files(made, Issuer(ca, 3600))
    server = handshake(ca / files.ROOT, (ca / files.GATEWAY, ca / files.GATEWAY_KEY), node, "gw.example.org")
    shown = server.getpeercert(binary_form=True)
    assert shown is not None
    assert NodeName.of(x509.load_der_x509_certificate(shown)) == EAST
    handshake(ca / files.ROOT, (node, None), node, "kv.east")
    with pytest.raises(ssl.SSLCertVerificationError, match="match"):
        handshake(ca / files.ROOT, (node, None), node, "gw.example.org")


def test_after_a_rotation_old_and_new_certificates_hold_and_a_running_issuer_signs_with_the_new(made: Path) -> None:
    ca = made / "ca"
    issuer = Issuer(ca, 3600)
    before = node_files(made, issuer)
    old = files.read(ca, files.INTERMEDIATE, files.INTERMEDIATE_KEY)
    run("rotate", made)
    after = node_files(made, issuer, NodeName("east", "p2", 3))
    new = files.read(ca, files.INTERMEDIATE, files.INTERMEDIATE_KEY)
    assert old.certificate != new.certificate
    assert files.pem(new.certificate) in after.read_bytes()
    for node in (before, after):
        handshake(ca / files.ROOT, (ca / files.GATEWAY, ca / files.GATEWAY_KEY), node, "127.0.0.1")


def test_a_new_root_is_believed_beside_the_old_one(made: Path) -> None:
    ca = made / "ca"
    before = node_files(made, Issuer(ca, 3600))
    issuer = Issuer(ca, 3600)
    old, root = issuer.root, create_root("prfaas root", NOW, 10)
    files.write(made / "offline", files.ROOT, files.ROOT_KEY, [root.certificate], root)
    run("rotate", made)
    assert len(x509.load_pem_x509_certificates(issuer.roots_pem)) == 2
    assert issuer.root == old  # nothing comes from the new one before all know it
    run("rotate", made)
    assert issuer.root == fingerprint(root.certificate)
    for node in (before, node_files(made, issuer, NodeName("east", "p2", 3))):
        handshake(ca / files.ROOT, (ca / files.GATEWAY, ca / files.GATEWAY_KEY), node, "127.0.0.1")


def test_a_certificate_of_another_root_is_refused(made: Path, tmp_path: Path) -> None:
    run("create", tmp_path / "other")
    node = node_files(tmp_path, Issuer(tmp_path / "other" / "ca", 3600))
    ca = made / "ca"
    with pytest.raises(ssl.SSLError):
        handshake(ca / files.ROOT, (ca / files.GATEWAY, ca / files.GATEWAY_KEY), node, "127.0.0.1")


def test_a_node_cannot_sign_for_another(made: Path) -> None:
    ca = made / "ca"
    issuer = Issuer(ca, 3600)
    key = new_key()
    issued = issuer.issue(EAST, CertificateRequest.parse(request_for(key, [])), NOW)
    mine = Credential(x509.load_pem_x509_certificates(issued.chain)[0], key)
    other = new_key()
    forged = mine.node(NodeName("local", "d", 0), CertificateRequest.parse(request_for(other, [])), NOW, 60)
    path = made / "forged.pem"
    path.write_bytes(files.pem(forged) + issued.chain + key_pem(other))
    with pytest.raises(ssl.SSLError):
        handshake(ca / files.ROOT, (ca / files.GATEWAY, ca / files.GATEWAY_KEY), path, "127.0.0.1")


def test_a_gateway_s_certificate_may_be_for_all_hosts_of_a_domain(made: Path) -> None:
    run("rotate", made, "--host", "*.gateways.example")
    ca = made / "ca"
    handshake(ca / files.ROOT, (ca / files.GATEWAY, ca / files.GATEWAY_KEY), None, "gw-1.gateways.example")


def test_nothing_holds_longer_than_what_signed_it(made: Path) -> None:
    issuer = Issuer(made / "ca", 1e9)
    issued = issuer.issue(EAST, CertificateRequest.parse(request_for(new_key(), [])), NOW)
    assert issued.until <= issuer.until
    with pytest.raises(ValueError, match="expired; rotate"):
        issuer.issue(EAST, CertificateRequest.parse(request_for(new_key(), [])), issuer.until + 1)


def test_a_folder_that_lacks_something_is_named_with_the_cure(made: Path) -> None:
    (made / "ca" / files.INTERMEDIATE_KEY).unlink()
    with pytest.raises(ConfigError, match="prfaas certs create"):
        Issuer(made / "ca", 3600)


def test_a_rotation_that_is_broken_changes_nothing(made: Path) -> None:
    issuer = Issuer(made / "ca", 3600)
    (made / "ca" / files.INTERMEDIATE).write_text("not yet written")
    issued = issuer.issue(EAST, CertificateRequest.parse(request_for(new_key(), [])), NOW)
    assert b"BEGIN CERTIFICATE" in issued.chain


def test_an_intermediate_of_another_root_of_the_same_name_is_refused(made: Path) -> None:
    root = create_root("prfaas root", NOW, 10)
    files.write_bundle(made / "ca", [root.certificate])
    with pytest.raises(ConfigError, match="comes from none of the roots"):
        Issuer(made / "ca", 3600)


def test_a_host_that_is_none_is_refused_by_name_and_nothing_is_written(tmp_path: Path) -> None:
    assert "'a b'" in run("create", tmp_path, "--host", "a b", code=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["", "x" * 100, "a\nb"])
def test_a_name_that_no_root_can_have_is_refused(tmp_path: Path, name: str) -> None:
    assert "--name" in run("create", tmp_path, "--name", name, code=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["create", "rotate"])
def test_the_root_s_key_does_not_get_into_the_gateway_s_folder(tmp_path: Path, command: str) -> None:
    where = ["--root", str(tmp_path / "ca"), "--out", str(tmp_path / "x" / ".." / "ca"), "--host", "h"]
    done = CliRunner().invoke(certs, [command, *where])
    assert (done.exit_code, "two folders" in done.output) == (2, True)
    assert not (tmp_path / "ca").exists()
