"""Flags that cannot work are refused with their name and a cure."""

import pytest

from kvcache.control import KvAddress
from kvcache.wire import Role
from node import config
from node.config import ConfigError, KvPort, TlsFiles


@pytest.mark.parametrize(
    ("gateway", "url"),
    [
        ("http://127.0.0.1:8000", "ws://127.0.0.1:8000/v1/nodes/stream"),
        ("http://localhost:8000/", "ws://localhost:8000/v1/nodes/stream"),
        ("ws://[::1]:8000", "ws://[::1]:8000/v1/nodes/stream"),
        ("https://gateway.example/front", "wss://gateway.example/front/v1/nodes/stream"),
        ("wss://10.0.0.1:8443", "wss://10.0.0.1:8443/v1/nodes/stream"),
    ],
)
def test_the_streams_url_follows_from_the_gateways(gateway, url):
    assert config.stream_url(gateway) == url


@pytest.mark.parametrize(
    "gateway",
    [
        "127.0.0.1:8000",
        "ftp://127.0.0.1",
        "http://",
        "http://10.0.0.1:8000",
        "ws://gateway.example",
        "http://127.0.0.1.example.com:8000",
        "https://user:secret@gateway.example",
        "https://gateway.example/?token=x",
        "http://[bad",
        "http://127.0.0.1:99999",
        "http://127.0.0.1:abc",
    ],
)
def test_a_gateway_that_is_no_url_or_would_be_spoken_to_in_the_clear_is_refused(gateway):
    with pytest.raises(ConfigError, match="--gateway"):
        config.stream_url(gateway)


def test_a_pool_has_a_page_at_least_and_fits_into_the_machine():
    assert config.pool_pages(1 << 20, 4096) == 256
    for size in (4095, 1 << 60):
        with pytest.raises(ConfigError, match="--pool-mib"):
            config.pool_pages(size, 4096)


def test_prefill_nodes_listen_and_decode_nodes_dial_unless_told_otherwise():
    assert config.kv_port(Role.PREFILL, None, None, 0, None) == KvPort("127.0.0.1", 0, None)
    assert config.kv_port(Role.DECODE, None, None, 0, None) is None
    assert config.kv_port(Role.DECODE, None, "127.0.0.1", 0, None) == KvPort("127.0.0.1", 0, None)
    assert config.kv_port(Role.DECODE, "in", None, 7, None) == KvPort("127.0.0.1", 7, None)
    assert config.kv_port(Role.PREFILL, "out", None, 0, None) is None


def test_bound_and_advertised_addresses_may_differ():
    port = config.kv_port(Role.PREFILL, "in", "0.0.0.0", 7000, "kv.example:7001")
    assert port == KvPort("0.0.0.0", 7000, KvAddress("kv.example", 7001))
    assert config.parse_address("[::1]:7", "--kv-advertise") == KvAddress("::1", 7)


@pytest.mark.parametrize(("host", "port", "advertise"), [("127.0.0.1", 0, None), (None, 7, None), (None, 0, "a:1")])
def test_a_node_that_only_dials_has_no_address(host, port, advertise):
    with pytest.raises(ConfigError, match="--dial out"):
        config.kv_port(Role.PREFILL, "out", host, port, advertise)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_an_address_that_nobody_can_dial_must_be_advertised_otherwise(host):
    with pytest.raises(ConfigError, match="--kv-advertise"):
        config.kv_port(Role.PREFILL, "in", host, 0, None)


@pytest.mark.parametrize("text", ["host", "host:", ":7", "host:99999", "host:7/x", "u@host:7", "host:0"])
def test_an_address_is_host_and_port(text):
    with pytest.raises(ConfigError, match="HOST:PORT"):
        config.parse_address(text, "--kv-advertise")


@pytest.fixture
def pem(tmp_path):
    files = [tmp_path / name for name in ("cert", "key", "ca")]
    for file in files:
        file.write_text("x")
    return files


def test_off_the_loopback_a_kv_port_needs_all_tls_files(pem):
    cert, key, ca = pem
    public = KvPort("10.0.0.1", 0, None)
    for files in (TlsFiles(), TlsFiles(ca=ca)):
        with pytest.raises(ConfigError, match=r"--kv-host: 10\.0\.0\.1 is not the loopback"):
            config.check_tls(files, public)
    assert config.check_tls(TlsFiles(cert, key, ca), public).complete
    assert not config.check_tls(TlsFiles(), KvPort("127.0.0.1", 0, None)).complete


def test_tls_files_come_together_and_exist(pem, tmp_path):
    cert, key, ca = pem
    with pytest.raises(ConfigError, match="belong together"):
        config.check_tls(TlsFiles(cert=cert, ca=ca), None)
    with pytest.raises(ConfigError, match="--kv-tls-ca: missing"):
        config.check_tls(TlsFiles(cert, key), None)
    with pytest.raises(ConfigError, match="is not a file"):
        config.check_tls(TlsFiles(cert, key, tmp_path / "nothing"), None)


@pytest.mark.parametrize("value", ["", "-x", "a b", "a/b", "x" * 64, "é"])
def test_names_are_safe_everywhere(value):
    with pytest.raises(ConfigError, match="--cluster"):
        config.name(value, "--cluster")


def test_a_made_up_node_id_is_a_valid_name_and_new_every_time():
    ids = {config.default_node_id(Role.DECODE) for _ in range(3)}
    assert len(ids) == 3
    assert all(config.name(node_id, "--node-id") and "decode" in node_id for node_id in ids)


def test_a_secret_is_one_line_of_a_file(tmp_path):
    file = tmp_path / "token"
    file.write_text("abc\n")
    assert config.read_secret(file, "--join-token-file") == "abc"
    assert config.read_secret(None, "--join-token-file") is None
    for bad in ("", "\n", "a\nb", "é"):
        file.write_text(bad)
        with pytest.raises(ConfigError, match="--join-token-file"):
            config.read_secret(file, "--join-token-file")
    with pytest.raises(ConfigError, match="--join-token-file"):
        config.read_secret(tmp_path / "nothing", "--join-token-file")
