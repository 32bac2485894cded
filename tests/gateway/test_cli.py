"""The command line: quick help, one-line errors, JSON, and a real gateway process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from click.testing import CliRunner

from gateway.cli import main
from gateway.config import ConfigError, GatewayConfig
from gateway.keys import KeyBook
from gateway.state import State
from kvcache.wire import Role
from tests.gateway.conftest import Open

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
        (("keys", "create", "--role", "client", "--state", "STATE"), "--role"),
    ],
)
def test_errors_are_one_line_and_name_the_option(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    done = prfaas(*(str(tmp_path / "s.db") if a == "STATE" else a for a in arguments))
    assert done.exit_code == 1
    assert done.output.startswith("Error: ")
    assert said in done.output
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
    assert json.loads(await run("explain", answer.headers["x-request-id"], "--json"))["route"] == "remote:east"
    missing = await asyncio.to_thread(prfaas, "explain", "nothing", *at)
    assert (missing.exit_code, len(missing.output.strip().splitlines())) == (1, 1)
    assert "only this machine" in await run("keys", "list")


def test_a_gateway_process_serves_drains_on_sigterm_and_exits_clean(model_dir: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    arguments = [
        "gateway",
        "--model",
        str(model_dir),
        "--model-name",
        "tiny",
        "--dtype",
        "float32",
        "--port",
        str(port),
    ]
    process = subprocess.Popen(
        [sys.executable, "-m", "gateway.cli", *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == f"prfaas gateway: listening on http://127.0.0.1:{port}\n"
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=10) as client:
            assert client.get("/live").status_code == 200
            assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=20)
        assert process.returncode == 0, errors
        assert time.monotonic() - began < 10
        assert "Traceback" not in errors
    finally:
        process.kill()
        process.wait()
