"""Executors beside our own nodes, against servers that take only what the real ones take."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway import executor_sglang
from gateway.config import ConfigError
from gateway.executor_kubernetes import PodLabel
from gateway.executor_sglang import SglangSwitch
from gateway.executors import ConversionFailed, Order
from gateway.rebalance_config import read
from kvcache.wire import Role
from scheduler.controller.settings import Mode

TO_DECODE = Order(None, Role.DECODE, 1)  # type: ignore[arg-type]  # neither looks at the node
"""Neither executor looks at the node."""


class Sglang:
    """One server: what it plays, and how often it is still busy. The launch role stays at the top of its info."""

    def __init__(self, busy: int = 0, fails: str = "", stays: bool = False) -> None:
        self.role, self.busy, self.fails, self.stays = "prefill", busy, fails, stays
        self.switches = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if (request.method, request.url.path) == ("GET", "/server_info"):
            live = {"disaggregation_mode": self.role}
            return httpx.Response(200, json={"disaggregation_mode": "prefill", "internal_states": [live]})
        if (request.method, request.url.path) != ("POST", "/pd_role_switch"):
            return httpx.Response(404, json={"detail": "Not Found"})
        assert request.headers["content-type"] == "application/json"
        body = json.loads(request.content)
        assert set(body) == {"new_role"}
        self.switches += 1
        if self.busy:
            self.busy -= 1
            return self._refuse("Cannot switch role: the scheduler is not idle")
        if self.fails:
            return self._refuse(self.fails)
        old, self.role = self.role, self.role if self.stays else body["new_role"]
        return httpx.Response(200, json={"success": True, "message": "ok", "old_role": old, "new_role": self.role})

    @staticmethod
    def _refuse(message: str) -> httpx.Response:
        return httpx.Response(400, json={"success": False, "message": message, "old_role": "", "new_role": ""})


def switch(server: Any) -> SglangSwitch:
    return SglangSwitch(httpx.AsyncClient(base_url="http://engine", transport=httpx.MockTransport(server)))


async def test_an_sglang_server_is_switched_once_it_is_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor_sglang, "TRY_AGAIN_S", 0.001)
    server = Sglang(busy=2)
    await switch(server).change(TO_DECODE)
    assert (server.role, server.switches) == ("decode", 3)


@pytest.mark.parametrize(
    ("server", "says"),
    [
        (Sglang(fails="role switching needs --enable-pd-role-switch"), "enable-pd-role-switch"),
        (Sglang(fails="rebuild failed; unhealthy, restart the server"), "unhealthy"),
        (Sglang(stays=True), "plays 'prefill'"),
        (lambda _: httpx.Response(502, text="bad gateway"), "POST /pd_role_switch"),
        (lambda _: httpx.Response(404, json={"detail": "Not Found"}), "HTTP 404"),
    ],
)
async def test_what_an_sglang_server_refuses_or_does_not_do_fails_the_conversion(server: Any, says: str) -> None:
    with pytest.raises(ConversionFailed, match=says):
        await switch(server).change(TO_DECODE)


class ApiServer:
    """Takes a merge patch of one pod's labels with the right token, and nothing else."""

    def __init__(self, keeps: bool = False) -> None:
        self.labels = {"app": "prfaas", "prfaas.dev/role": "prefill"}
        self.keeps = keeps

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.headers.get("authorization") != "Bearer secret":
            return httpx.Response(401, json={"kind": "Status", "code": 401})
        if (request.method, request.url.path) != ("PATCH", "/api/v1/namespaces/prod/pods/decode-0"):
            return httpx.Response(403, json={"kind": "Status", "code": 403})
        if request.headers["content-type"] != "application/merge-patch+json":
            return httpx.Response(415, json={"kind": "Status", "code": 415})
        patch = json.loads(request.content)
        assert set(patch) == {"metadata"}
        assert set(patch["metadata"]) == {"labels"}
        if not self.keeps:
            self.labels |= patch["metadata"]["labels"]
        return httpx.Response(200, json={"kind": "Pod", "metadata": {"name": "decode-0", "labels": self.labels}})


def label(server: ApiServer, token_file: Path, pod: str = "decode-0") -> PodLabel:
    http = httpx.AsyncClient(base_url="https://kubernetes", transport=httpx.MockTransport(server))
    return PodLabel(http, "prod", pod, "prfaas.dev/role", token_file)


async def test_a_pods_label_follows_and_its_other_labels_stay(tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("secret\n")
    server = ApiServer()
    await label(server, token).change(TO_DECODE)
    assert server.labels == {"app": "prfaas", "prfaas.dev/role": "decode"}


@pytest.mark.parametrize(
    ("pod", "token", "keeps", "says"),
    [
        ("decode-0", "stolen", False, "401"),
        ("other", "secret", False, "403"),
        ("decode-0", "secret", True, "kept"),
        ("decode-0", None, False, "token"),
    ],
)
async def test_a_label_that_cannot_be_set_fails_the_conversion(
    tmp_path: Path, pod: str, token: str | None, keeps: bool, says: str
) -> None:
    file = tmp_path / "token"
    if token is not None:
        file.write_text(token)
    with pytest.raises(ConversionFailed, match=says) as failed:
        await label(ApiServer(keeps), file, pod).change(TO_DECODE)
    assert "secret" not in str(failed.value)


def test_a_file_sets_times_gains_and_executors(tmp_path: Path) -> None:
    file = tmp_path / "rebalance.toml"
    file.write_text(
        "step_s = 2\n[controller]\ndwell_s = 5\nleast_requests = 10\n[limits]\ndrain_s = 9\n"
        '[nodes.d1]\nsglang = "http://10.0.0.7:30000"\n'
    )
    found = read(Mode.AUTO, file)
    assert (found.settings.mode, found.settings.dwell_s, found.settings.least_requests) == (Mode.AUTO, 5, 10)
    assert (found.limits.drain_s, found.step_s) == (9, 2.0)
    assert [type(one) for one in found.executors["d1"]] == [SglangSwitch]
    assert read(Mode.OBSERVE, None).executors == {}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("step_s = 0", "step_s"),
        ("pace = 1", "pace: unknown"),
        ("[controller]\nmode = 'auto'", "controller.mode: unknown"),
        ("[controller]\ndwell_s = 'long'", "controller.dwell_s: must be float"),
        ("[controller]\ndwell_s = -1", "dwell_s must be positive"),
        ("[limits]\nflip_s = 1e9", "limits.flip_s"),
        ("[nodes.d1]\nsglang = 'ftp://x'", "nodes.d1.sglang"),
        ("[nodes.d1]\npod = 'd1'", "service account"),
        ("nodes = 3", "nodes: must be a table"),
        ("[nodes.d1", "--rebalance-config"),
    ],
)
def test_a_file_that_cannot_work_is_refused_by_field(tmp_path: Path, text: str, says: str) -> None:
    file = tmp_path / "rebalance.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=says):
        read(Mode.OBSERVE, file)
