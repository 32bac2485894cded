import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from kvcache.node_certificates import MAX_HOSTS, CertificateRequest, NodeName, host_name, new_key, request_for


def test_a_request_says_its_key_and_hosts() -> None:
    key = new_key()
    request = CertificateRequest.parse(request_for(key, ["kv.example.org", "10.0.0.7", "fd00::1"]))
    assert request.public_key == key.public_key()
    assert request.hosts == ("kv.example.org", "10.0.0.7", "fd00::1")


def test_a_request_without_hosts_is_of_a_node_that_only_dials() -> None:
    assert CertificateRequest.parse(request_for(new_key(), [])).hosts == ()


def test_a_request_that_does_not_prove_its_key_is_refused() -> None:
    der = bytearray(request_for(new_key(), []))
    der[-1] ^= 1
    with pytest.raises(ValueError, match="request:"):
        CertificateRequest.parse(bytes(der))


def test_a_request_over_another_kind_of_key_is_refused() -> None:
    name = x509.Name([])
    signed = x509.CertificateSigningRequestBuilder().subject_name(name).sign(ed25519.Ed25519PrivateKey.generate(), None)
    with pytest.raises(ValueError, match="P-256"):
        CertificateRequest.parse(signed.public_bytes(serialization.Encoding.DER))


@pytest.mark.parametrize("data", [b"", b"no request", b"\x30\x80" * 50, b"x" * 20_000])
def test_what_is_no_request_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="request:"):
        CertificateRequest.parse(data)


def test_too_many_hosts_are_refused() -> None:
    with pytest.raises(ValueError, match="at most"):
        CertificateRequest.parse(request_for(new_key(), [f"h{n}.example.org" for n in range(MAX_HOSTS + 1)]))


@pytest.mark.parametrize("host", ["", "a b", "*.example.org", "x" * 300, "-a", "prfaas://east/n"])
def test_what_is_no_host_gets_no_name(host: str) -> None:
    with pytest.raises(ValueError, match="neither an address nor a host name"):
        host_name(host)


def test_a_certificate_that_names_two_nodes_names_none() -> None:
    key = new_key()
    uris = [NodeName("east", node, 0).uri for node in ("a", "b")]
    names = x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri) for uri in uris])
    with pytest.raises(ValueError, match="names no node"):
        NodeName.of(_certificate(key, names))


@pytest.mark.parametrize(
    "uri", ["prfaas://east/n", "prfaas://east/n?epoch=01", "prfaas://east/a/b?epoch=1", "spiffe://e/n"]
)
def test_a_name_of_another_form_is_no_node(uri: str) -> None:
    with pytest.raises(ValueError, match="names no node"):
        NodeName.of(_certificate(new_key(), x509.SubjectAlternativeName([x509.UniformResourceIdentifier(uri)])))


def _certificate(key, names):
    import datetime

    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([]))
        .issuer_name(x509.Name([]))
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now)
        .not_valid_after(now + datetime.timedelta(hours=1))
        .add_extension(names, critical=True)
        .sign(key, hashes.SHA256())
    )
