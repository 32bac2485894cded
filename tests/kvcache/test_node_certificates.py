import time

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec, ed25519

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


@pytest.mark.parametrize("host", ["a" * 60 + "!", "a." * 120 + "!", "-" * 250])
def test_a_host_that_is_none_is_refused_in_no_time(host: str) -> None:
    begun = time.perf_counter()
    with pytest.raises(ValueError, match="neither an address nor a host name"):
        host_name(host)
    assert time.perf_counter() - begun < 0.1


@pytest.mark.parametrize(
    ("names", "value"),
    [
        (["kv.example.org"], b"\x30\x03\x82\x01a"),  # the extension twice
        ([], b"\x30\x04\xa3\x02\x30\x00"),  # an X.400 address
        ([], b"\x30\x03\x82\x01\xff"),  # no ASCII
        ([], b"\x30\x04\x87\x02\x0a\x00"),  # half an address
        ([], b"\x30\x80"),
    ],
)
def test_names_that_cannot_be_read_are_refused(names: list[str], value: bytes) -> None:
    key = new_key()
    builder = x509.CertificateSigningRequestBuilder().subject_name(x509.Name([]))
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName([host_name(one) for one in names]), critical=False)
    placeholder = x509.ObjectIdentifier("2.5.29.99")
    made = builder.add_extension(x509.UnrecognizedExtension(placeholder, value), critical=False).sign(
        key, hashes.SHA256()
    )
    told = made.tbs_certrequest_bytes.replace(b"\x55\x1d\x63", b"\x55\x1d\x11")
    assert told != made.tbs_certrequest_bytes
    algorithm = bytes.fromhex("300a06082a8648ce3d040302")
    signature = key.sign(told, ec.ECDSA(hashes.SHA256()))
    der = _tagged(0x30, told + algorithm + _tagged(0x03, b"\x00" + signature))
    with pytest.raises(ValueError, match="its names cannot be read"):
        CertificateRequest.parse(der)


def _tagged(tag: int, data: bytes) -> bytes:
    """One DER element."""
    size = len(data)
    length = bytes([size]) if size < 128 else b"\x81" + bytes([size]) if size < 256 else b"\x82" + size.to_bytes(2)
    return bytes([tag]) + length + data


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
