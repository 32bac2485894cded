"""The command line: quick help, one-line errors, JSON, and a real gateway process."""

from __future__ import annotations

import asyncio
import ipaddress
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID

from gateway.cli import main
from gateway.config import ConfigError, GatewayConfig
from gateway.keys import KeyBook
from gateway.state import State
from kvcache.control import GenerateJob, ModelInfo
from kvcache.wire import Role
from tests.gateway.conftest import Open
from tests.gateway.fakes import FakeNode, answer_well

ROOT = Path(__file__).parents[2]


def prfaas(*arguments: str) -> Any:
    return CliRunner().invoke(main, list(arguments), prog_name="prfaas")


def test_help_loads_neither_torch_nor_a_web_framework() -> None:
    code = (
        "import sys\nfrom gateway.cli import main\n"
        "try: main(['--help'])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'fastapi', 'uvicorn', 'httpx', 'tokenizers', 'rich'} & set(sys.modules)\n"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert all(name in done.stdout for name in ("gateway", "clusters", "nodes", "keys", "status", "explain"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("status", "--gateway", "http://127.0.0.1:9"), "gateway http://127.0.0.1:9"),
        (("status", "--gateway", "nonsense"), "nonsense"),
        (("gateway", "--model", "/missing"), "--model /missing"),
        (("gateway", "--model", "/missing", "--tls-cert", "x"), "--tls-cert and --tls-key"),
        (("gateway", "--model", "/missing", "--join-token-file", "/missing"), "--join-token-file"),
        (("gateway", "--model", "/missing", "--local-cluster", "a b"), "--local-cluster"),
        (("gateway", "--model", "/missing", "--local-cluster", "a\n"), "--local-cluster"),
        (("keys", "create", "--role", "client", "--state", "STATE"), "--role"),
    ],
)
def test_errors_are_one_line_and_name_the_option(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    done = prfaas(*(str(tmp_path / "s.db") if a == "STATE" else a for a in arguments))
    assert done.exit_code == 1
    assert done.output.startswith("Error: ")
    assert said in done.output
    assert len(done.output.strip().splitlines()) == 1


def test_the_root_of_a_gateway_may_come_from_the_environment(tmp_path: Path) -> None:
    missing = tmp_path / "nowhere.pem"
    done = CliRunner().invoke(main, ["status", "--gateway", "https://127.0.0.1:9"], env={"PRFAAS_CA": str(missing)})
    assert done.exit_code == 2
    assert "nowhere.pem" in done.output.replace("\n", "")


@pytest.mark.parametrize("token", [b"", b"caf\xc3\xa9", b"two\nlines", b"\xff"])
def test_a_join_token_that_no_node_could_send_is_refused(tmp_path: Path, token: bytes) -> None:
    file = tmp_path / "token"
    file.write_bytes(token)
    done = prfaas("gateway", "--model", "/missing", "--join-token-file", str(file))
    assert (done.exit_code, "--join-token-file" in done.output) == (1, True), done.output


DAMAGED_MODELS: dict[str, tuple[str, bytes]] = {
    "config.json": ("config.json", b"{"),
    "text_config": ("config.json", b'{"model_type": "llama", "text_config": 7}'),
    "num_hidden_layers": ("config.json", b'{"model_type": "llama", "num_hidden_layers": -3}'),
    "tokenizer.json": ("tokenizer.json", b"{"),
    "model.safetensors": ("model.safetensors", b"\x02\0\0\0\0\0\0\0[]"),
    "chat_template.jinja": ("chat_template.jinja", b"\xff"),
    "tokenizer_config.json": ("tokenizer_config.json", b"\xff"),
}


@pytest.mark.parametrize("named", DAMAGED_MODELS)
def test_a_damaged_file_of_the_model_is_named_in_one_line(tmp_path: Path, model_dir: Path, named: str) -> None:
    for file in model_dir.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    name, data = DAMAGED_MODELS[named]
    (tmp_path / name).write_bytes(data)
    done = prfaas("gateway", "--model", str(tmp_path), "--dtype", "float32", "--port", "0")
    assert done.exit_code == 1
    assert done.output.startswith("Error: ")
    assert named in done.output
    assert len(done.output.strip().splitlines()) == 1


def test_off_the_loopback_keys_and_tls_are_both_needed(model_dir: Path) -> None:
    bare = GatewayConfig(model_dir, "tiny", host="0.0.0.0")
    with pytest.raises(ConfigError) as refused:
        bare.check_exposure(has_keys=False)
    assert "prfaas keys create" in str(refused.value)
    assert "--tls-cert" in str(refused.value)
    with pytest.raises(ConfigError, match="TLS"):
        bare.check_exposure(has_keys=True)
    safe = GatewayConfig(model_dir, "tiny", host="0.0.0.0", tls_cert=Path("c"), tls_key=Path("k"))
    with pytest.raises(ConfigError, match="key"):
        safe.check_exposure(has_keys=False)
    safe.check_exposure(has_keys=True)
    for host in ("127.0.0.1", "localhost", "::1", "127.8.8.8"):
        GatewayConfig(model_dir, "tiny", host=host).check_exposure(has_keys=False)


def test_a_gateway_off_the_loopback_without_keys_does_not_start(model_dir: Path) -> None:
    done = prfaas("gateway", "--model", str(model_dir), "--dtype", "float32", "--host", "0.0.0.0", "--port", "0")
    assert done.exit_code == 1
    assert "refusing to listen on 0.0.0.0" in done.output


def test_the_first_key_can_be_made_in_the_state_file(tmp_path: Path) -> None:
    file = tmp_path / "state.db"
    done = prfaas("keys", "create", "--role", "admin", "--state", str(file), "--json")
    made = json.loads(done.output)
    state = State(file)
    assert KeyBook(state).find(made["key"]) is not None
    state.close()


async def test_operators_see_what_there_is(stage: Open) -> None:
    one = await stage()
    await one.pair("east")
    await one.node("p-local", Role.PREFILL)
    answer = await one.complete(words=60)
    at = ("--gateway", one.url)

    async def run(*arguments: str) -> str:
        done = await asyncio.to_thread(prfaas, *arguments, *at)
        assert done.exit_code == 0, done.output
        output: str = done.output
        return output

    assert "east" in await run("clusters", "list")
    assert json.loads(await run("clusters", "show", "east", "--json"))["node_list"][0]["node_id"] == "p-east"
    assert "draining" in await run("clusters", "drain", "east")
    assert "active" in await run("clusters", "resume", "east")
    assert "west" in await run("clusters", "register", "west", "--dial", "out")
    assert "removed" in await run("clusters", "remove", "west")
    assert "p-local" in await run("nodes", "list")
    assert (await run("status")).startswith("ready")
    told = await run("explain", answer.headers["x-request-id"])
    assert "more uncached tokens than the threshold" in told
    assert "p-east" in told
    assert "exactness" in told
    assert "lossless" in told
    assert json.loads(await run("explain", answer.headers["x-request-id"], "--json"))["route"] == "remote:east"
    missing = await asyncio.to_thread(prfaas, "explain", "nothing", *at)
    assert (missing.exit_code, len(missing.output.strip().splitlines())) == (1, 1)
    assert "only this machine" in await run("keys", "list")


class Process:
    """A gateway process on a free port."""

    def __init__(self, model_dir: Path, *options: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        arguments = ["gateway", "--model", str(model_dir), "--model-name", "tiny", "--dtype", "float32"]
        self.popen = subprocess.Popen(
            [sys.executable, "-m", "gateway.cli", *arguments, "--port", str(self.port), *options],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.popen.stdout is not None
        self.said = self.popen.stdout.readline()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.popen.kill()
        self.popen.communicate()

    def terminate(self) -> None:
        """SIGTERM; it must end by itself, well, and without a traceback."""
        self.popen.send_signal(signal.SIGTERM)
        _, errors = self.popen.communicate(timeout=20)
        assert self.popen.returncode == 0, errors
        assert "Traceback" not in errors


def test_a_gateway_process_serves_and_exits_clean_on_sigterm(model_dir: Path) -> None:
    with Process(model_dir) as process:
        assert process.said == f"prfaas gateway: listening on http://127.0.0.1:{process.port}\n"
        with httpx.Client(base_url=f"http://127.0.0.1:{process.port}", timeout=10) as client:
            assert client.get("/live").status_code == 200
            assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        began = time.monotonic()
        process.terminate()
        assert time.monotonic() - began < 10


async def test_requests_at_hand_finish_after_sigterm_and_new_ones_are_refused(model_dir: Path, info: ModelInfo) -> None:
    asked = asyncio.Event()

    async def slowly(node: FakeNode, job: GenerateJob) -> None:
        asked.set()
        await asyncio.sleep(1.0)
        await answer_well(node, job)

    with Process(model_dir) as process:
        url = f"http://127.0.0.1:{process.port}"
        node = await FakeNode(url, "d", Role.DECODE, info, on_generate=slowly).start()
        body = {"model": "tiny", "prompt": "ab"}
        async with httpx.AsyncClient(base_url=url, timeout=20) as client:
            request = asyncio.create_task(client.post("/v1/completions", json=body))
            await asyncio.wait_for(asked.wait(), 10)
            ending = asyncio.create_task(asyncio.to_thread(process.terminate))
            await asyncio.sleep(0.3)
            refused = await client.post("/v1/completions", json=body)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "shutting_down")
            assert (await client.get("/ready")).status_code == 503
            answer = await request
        assert answer.status_code == 200
        assert answer.json()["usage"]["completion_tokens"] == 3
        await ending
        await node.stop()


async def test_one_that_lingers_takes_requests_and_has_whoever_asks_go_elsewhere_next_time(
    model_dir: Path, info: ModelInfo
) -> None:
    with Process(model_dir, "--linger", "1.5") as process:
        url = f"http://127.0.0.1:{process.port}"
        node = await FakeNode(url, "d", Role.DECODE, info).start()
        body = {"model": "tiny", "prompt": "ab"}
        async with httpx.AsyncClient(base_url=url, timeout=20) as kept:
            assert "connection" not in (await kept.post("/v1/completions", json=body)).headers
            began = time.monotonic()
            ending = asyncio.create_task(asyncio.to_thread(process.terminate))
            async with httpx.AsyncClient(base_url=url, timeout=20) as probe:
                for _ in range(100):
                    ready = await probe.get("/ready")
                    if ready.status_code == 503:
                        break
                    await asyncio.sleep(0.01)
            assert ready.json()["reason"] == "shutting down"
            for client in (kept, httpx.AsyncClient(base_url=url, timeout=20)):
                answer = await client.post("/v1/completions", json=body)
                assert (answer.status_code, answer.headers["connection"]) == (200, "close")
            await client.aclose()
        await ending
        assert time.monotonic() - began >= 1.5
        await node.stop()


def certificate(directory: Path) -> tuple[Path, Path]:
    """A self-signed certificate for 127.0.0.1 and its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "gateway")])
    now = datetime.now(UTC)
    alternative = x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(alternative, critical=False)
        .sign(key, hashes.SHA256())
    )
    cert_file, key_file = directory / "cert.pem", directory / "key.pem"
    cert_file.write_bytes(made.public_bytes(Encoding.PEM))
    key_file.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    return cert_file, key_file


def test_with_keys_and_tls_a_gateway_listens_off_the_loopback_and_asks_everybody_for_a_key(
    model_dir: Path, tmp_path: Path
) -> None:
    cert, key = certificate(tmp_path)
    state = tmp_path / "state.db"
    secret = prfaas("keys", "create", "--role", "admin", "--state", str(state)).output.strip()
    options = ("--host", "0.0.0.0", "--state", str(state), "--tls-cert", str(cert), "--tls-key", str(key))
    with Process(model_dir, *options) as process:
        url = f"https://127.0.0.1:{process.port}"
        with httpx.Client(base_url=url, verify=ssl.create_default_context(cafile=str(cert)), timeout=10) as client:
            assert client.get("/live").status_code == 200
            assert client.get("/v1/models").status_code == 401
            assert client.get("/v1/models", headers={"authorization": f"Bearer {secret}"}).status_code == 200
        done = prfaas("status", "--gateway", url, "--key", secret, "--ca", str(cert))
        assert done.exit_code == 0, done.output
        assert done.output.startswith("not ready: no decode node")
        process.terminate()


def test_a_gateway_says_where_it_listens_as_others_write_it(model_dir: Path) -> None:
    with Process(model_dir, "--host", "::1") as process:
        assert process.said == f"prfaas gateway: listening on http://[::1]:{process.port}\n"


@pytest.mark.parametrize("wrong", ["port", "host", "tls"])
def test_an_address_or_certificate_that_cannot_be_used_is_one_clear_line(
    model_dir: Path, tmp_path: Path, wrong: str
) -> None:
    garbage = tmp_path / "garbage.pem"
    garbage.write_text("not a certificate")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        options: tuple[str, ...] = {
            "port": ("--port", str(taken.getsockname()[1])),
            "host": (
                "--host",
                "::1",
                "--port",
                str(taken.getsockname()[1]),
                "--tls-cert",
                "/missing",
                "--tls-key",
                "/m",
            ),
            "tls": ("--tls-cert", str(garbage), "--tls-key", str(garbage)),
        }[wrong]
        done = prfaas("gateway", "--model", str(model_dir), "--dtype", "float32", *options)
    assert done.exit_code == 1
    assert len(done.output.strip().splitlines()) == 1
    assert {"port": "address already in use", "host": "--tls-cert /missing", "tls": "--tls-cert"}[
        wrong
    ] in done.output.replace("Address", "address")
