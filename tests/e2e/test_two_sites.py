"""Two sites, each in a network of its own, from nothing to a cluster that was used and removed, by operators' commands.

Certificates, a cluster registered and approved, nodes that join over mutual TLS, a long prompt offloaded, the cluster
drained under load. Once nobody can connect to the remote site, once nobody to the local one but to its gateway.
"""

from __future__ import annotations

import json
import os
import random
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from deploy.stack import Process
from tests.models import tiny_model
from tests.wan.direction import LinkSettings
from tests.wan.link import End, Wan, wide_area
from tests.wan.namespaces import WanUnavailable

ROOT = Path(__file__).parents[2]
PORT, KV_PORT = 8443, 7443
GATEWAY, NODE = "gateway.cli:main", "node.cli:node"
READY_S = 90.0
COMMAND = "from gateway.cli import main; main()"
LINK = {"rate_bps": 2e8, "delay_s": 0.01}


@dataclass
class Sites:
    """The home site at the far end of the link, the remote one at its near end."""

    wan: Wan
    folder: Path
    model: Path
    processes: dict[str, Process] = field(default_factory=dict)

    @property
    def url(self) -> str:
        return f"https://{self.wan.far.address}:{PORT}"

    @property
    def ca(self) -> Path:
        return self.folder / "certificates" / "root.pem"

    def command(self, *words: str, key: str | None = None, code: int = 0) -> str:
        """Type one command at the home site; what it said on stdout."""
        talk = ["--gateway", self.url, "--ca", str(self.ca)] if key else []
        environment = os.environ | {"PYTHONPATH": str(ROOT)} | ({"PRFAAS_KEY": key} if key else {})
        with self.wan.far.entered():
            done = subprocess.run(
                [sys.executable, "-c", COMMAND, *words, *talk],
                cwd=self.folder, env=environment, capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL,
            )  # fmt: skip
        assert done.returncode == code, done.stderr + done.stdout
        return done.stdout.strip()

    def start(self, end: End, name: str, command: str, *arguments: str) -> None:
        with end.entered():
            self.processes[name] = Process(name, command, arguments, self.folder / f"{name}.log")

    def node(self, end: End, name: str, cluster: str, role: str, *options: str) -> None:
        self.start(
            end, name, NODE, "--role", role, "--cluster", cluster, "--node-id", name, "--gateway", self.url,
            "--model", str(self.model), "--model-name", "tiny", "--dtype", "float32", "--pool-mib", "32",
            "--join-token-file", str(self.folder / f"join-{cluster}"), *options,
        )  # fmt: skip

    def until(self, what: str, condition: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + READY_S
        while time.monotonic() < deadline:
            for process in self.processes.values():
                process.check()
            found = condition()
            if found:
                return found
            time.sleep(0.1)
        raise AssertionError(f"{what} did not come about; " + "\n".join(p.tail() for p in self.processes.values()))

    def http(self, key: str) -> httpx.Client:
        """A client at the home site. The sockets stay where they are made."""
        trust = ssl.create_default_context(cafile=str(self.ca))
        return httpx.Client(base_url=self.url, verify=trust, timeout=60, headers={"authorization": f"Bearer {key}"})


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model("llama", tmp_path_factory.mktemp("model"))


@pytest.fixture
def sites(request: pytest.FixtureRequest, tmp_path: Path, model: Path) -> Iterator[Sites]:
    settings = LinkSettings(**LINK, **request.param)
    with ExitStack() as held:
        try:
            wan = held.enter_context(wide_area(settings))
        except WanUnavailable as error:
            pytest.skip(f"no wide-area link: {error}")
        one = Sites(wan, tmp_path, model)
        try:
            yield one
        finally:
            for process in reversed(one.processes.values()):
                process.terminate()
            for process in one.processes.values():
                process.wait(time.monotonic() + 8)


def install(sites: Sites, dial: str) -> tuple[str, str]:
    """From nothing to a cluster whose node has joined: an admin's key, and the one of the remote site's operator."""
    home, away = sites.wan.far, sites.wan.near
    sites.command("certs", "create", "--root", "offline", "--out", "certificates", "--host", home.address)
    admin, made = sites.command("keys", "generate"), sites.ca.parent
    (sites.folder / "admin-key").write_text(admin)
    sites.start(
        home, "gateway", GATEWAY, "gateway", "--model", str(sites.model), "--model-name", "tiny", "--dtype", "float32",
        "--host", home.address, "--port", str(PORT), "--state", str(sites.folder / "state.db"), "--threshold", "300",
        "--ca", str(made), "--tls-cert", str(made / "gateway.pem"), "--tls-key", str(made / "gateway-key.pem"),
        "--admin-key-file", str(sites.folder / "admin-key"),
    )  # fmt: skip
    sites.until("the gateway", lambda: sites.processes["gateway"].says("listening on"))
    (sites.folder / "join-local").write_text(sites.command("clusters", "rotate", "local", key=admin))
    operator = sites.command("keys", "create", "--role", "operator", "--cluster", "east", key=admin)
    terms = ("--dial", dial, "--region", "eu", "--egress-gbps", "0.2", "--endpoint", away.address)
    token = sites.command("clusters", "register", "east", *terms, key=operator)
    (sites.folder / "join-east").write_text(token)
    listens = ("--dial", "in", "--kv-port", str(KV_PORT))
    if dial == "out":
        sites.node(home, "decode", "local", "decode", *listens, "--kv-host", home.address)
        sites.node(home, "prefill", "local", "prefill", "--dial", "out")
        sites.node(away, "east-1", "east", "prefill", "--dial", "out")
    else:
        sites.node(home, "decode", "local", "decode", "--dial", "out")
        sites.node(home, "prefill", "local", "prefill", *listens, "--kv-host", home.address)
        sites.node(away, "east-1", "east", "prefill", *listens, "--kv-host", away.address)
    sites.until("word that approval is missing", lambda: sites.processes["east-1"].says("waits for approval"))
    assert "approved" not in sites.command("clusters", "approve", "east", key=operator, code=1)
    sites.command("clusters", "approve", "east", key=admin)
    for name in ("decode", "prefill", "east-1"):
        sites.until(name, lambda name=name: sites.processes[name].says(f"{name} ready"))
    return admin, operator


def prompt(tokens: int) -> list[int]:
    drawn = random.Random(tokens)
    return [drawn.randrange(4, 500) for _ in range(tokens)]


def completed(http: httpx.Client, ids: list[int]) -> httpx.Response:
    body = {"model": "tiny", "prompt": ids, "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    return http.post("/v1/completions", json=body)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("sites", "dial"),
    [({"near_open": ()}, "out"), ({"far_open": (PORT,)}, "in")],
    indirect=["sites"],
    ids=["remote site closed", "local site closed"],
)
def test_a_cluster_elsewhere_from_its_registration_to_its_removal(sites: Sites, dial: str) -> None:
    admin, operator = install(sites, dial)
    with sites.wan.far.entered(), sites.http(admin) as http:
        sites.until("readiness", lambda: http.get("/ready").status_code == 200)
        short = completed(http, prompt(40))
        assert short.headers["x-prfaas-route"] == "local"
        far = sites.until("an offloaded prompt", lambda: _away(completed(http, prompt(random.randrange(700, 900)))))
        assert far.json()["usage"]["completion_tokens"] == 4
        record = json.loads(sites.command("explain", far.headers["x-request-id"], "--json", key=admin))
        assert record["attempts"][-1]["cluster"] == "east"

        answers: list[int] = []
        stop = threading.Event()

        def load() -> None:
            with sites.wan.far.entered(), sites.http(admin) as mine:
                while not stop.is_set():
                    answers.append(completed(mine, prompt(random.randrange(320, 900))).status_code)

        crowd = [threading.Thread(target=load) for _ in range(3)]
        for each in crowd:
            each.start()
        time.sleep(1.0)
        sites.command("clusters", "drain", "east", key=operator)
        time.sleep(1.5)
        stop.set()
        for each in crowd:
            each.join(60)
        assert set(answers) == {200}, answers
        assert len(answers) > 5
        assert completed(http, prompt(650)).headers["x-prfaas-route"] == "local"

        sites.command("clusters", "remove", "east", key=operator)
        remote = sites.processes.pop("east-1")
        deadline = time.monotonic() + 20
        while remote.running and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not remote.running
        assert "was removed" in remote.tail()
        report = json.loads(sites.command("report", "rebalancing", "--format", "json", key=admin))
        assert report
        told = json.loads(sites.command("audit", "--json", key=admin))["entries"]
        done = [
            entry["action"].partition("/v1/clusters")[2]
            for entry in reversed(told)
            if "/v1/clusters" in entry["action"]
        ]
        assert done == ["/local/rotate", "", "/east/approve", "/east/approve", "/east/drain", "/east"]


def _away(answer: httpx.Response) -> httpx.Response | None:
    assert answer.status_code == 200, answer.text
    return answer if answer.headers["x-prfaas-route"] == "remote:east" else None
