"""Compose files and systemd units start commands with flags that these have."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.arguments import check

yaml = pytest.importorskip("yaml", reason="the test extra installs it")

DEPLOY = Path(__file__).parents[2] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
_VARIABLE = re.compile(r"\$\{(\w+)(?::[-?]([^}]*))?\}")
VALUES = {
    "PRFAAS_MODEL": "gemma",
    "PRFAAS_GATEWAY": "https://gw.example.org:8443",
    "PRFAAS_KV_ADVERTISE": "kv.example.org:7443",
    "PRFAAS_CLUSTER": "east",
    "PRFAAS_NODE": "east-1",
}


def services(name: str) -> dict[str, Any]:
    text = _VARIABLE.sub(lambda found: VALUES.get(found[1], "0"), (DEPLOY / "compose" / name).read_text())
    found: dict[str, Any] = yaml.safe_load(text)
    return found


@pytest.mark.parametrize("name", ["home.yaml", "remote.yaml"])
def test_compose_starts_commands_with_flags_that_they_have(name: str) -> None:
    checked = []
    for service, spec in services(name)["services"].items():
        if service != "redis":
            check(spec["command"])
            checked.append(service)
    assert checked == (["gateway", "prefill", "decode"] if name == "home.yaml" else ["prefill"])


@pytest.mark.parametrize("name", ["home.yaml", "remote.yaml"])
def test_every_secret_and_volume_that_a_service_uses_is_declared(name: str) -> None:
    whole = services(name)
    for spec in whole["services"].values():
        assert set(spec.get("secrets", ())) <= set(whole["secrets"])
        for mount in spec.get("volumes", ()):
            source = mount.split(":")[0]
            assert source.startswith("./") or source in whole["volumes"], mount
    used = {secret for spec in whole["services"].values() for secret in spec.get("secrets", ())}
    assert used == set(whole["secrets"])


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_units_start_commands_with_flags_that_they_have(unit: Path, tmp_path: Path) -> None:
    line = next(line for line in unit.read_text().splitlines() if line.startswith("ExecStart="))
    program, *arguments = shlex.split(line.removeprefix("ExecStart="))
    assert program == "/opt/prfaas/bin/prfaas"
    filed = tmp_path / "gateway.toml"
    filed.write_text('model = "m"\n')
    plain = [argument.replace("/etc/prfaas/gateway.toml", str(filed)) for argument in arguments]
    if "$PRFAAS_NODE_FLAGS" in plain:
        plain.remove("$PRFAAS_NODE_FLAGS")
        plain += ["--role", "prefill", "--cluster", "east", "--gateway", "https://gw", "--model", "m"]
    check(plain)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_takes_the_units(unit: Path, tmp_path: Path) -> None:
    text = unit.read_text().replace("/opt/prfaas/bin/prfaas", shutil.which("true") or "/bin/true")
    copy = tmp_path / (unit.name.replace("@", "@east"))
    copy.write_text(text.replace("User=prfaas\n", ""))
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", str(copy)], capture_output=True, text=True, timeout=60
    )
    said = [line for line in done.stderr.splitlines() if copy.name in line]
    assert said == [], done.stderr
