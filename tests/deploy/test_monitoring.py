"""Alert rules and dashboard speak of metrics that a gateway really exports."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from kvcache.wire import Role
from tests.gateway.conftest import *  # noqa: F403 (the gateway's fixtures)
from tests.gateway.conftest import Open

FILES = Path(__file__).parents[2] / "deploy" / "helm" / "prfaas" / "files"
ALERTS, DASHBOARD = FILES / "alerts.yaml", FILES / "dashboard.json"
_NAME = re.compile(r"\bprfaas_[a-z0-9_]+")
_LABELLED = re.compile(r"\b(prfaas_[a-z0-9_]+)\{([^}]*)\}")


def expressions() -> list[str]:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    found = [target["expr"] for panel in panels for target in panel["targets"]]
    return found + re.findall(r"^ +expr: (.*)$", ALERTS.read_text(), re.MULTILINE)


async def test_every_metric_of_alerts_and_dashboard_is_exported_with_the_labels_that_they_name(stage: Open) -> None:
    one = await stage()
    await one.pair("east")
    assert (await one.complete(words=40)).status_code == 200
    assert (await one.complete(words=40, model="another")).status_code == 404
    text = (await one.client.get("/metrics")).text
    declared = set(re.findall(r"^# TYPE (prfaas_\S+) ", text, re.MULTILINE))
    samples = {
        name for family in declared for name in (family, *(f"{family}_{end}" for end in ("bucket", "sum", "count")))
    }
    used = {name for expression in expressions() for name in _NAME.findall(expression)}
    assert len(used) > 25
    assert sorted(used - samples) == []
    for expression in expressions():
        for name, labels in _LABELLED.findall(expression):
            for label in re.findall(r"([a-z_]+)(?:=~?|!=|!~)", labels):
                assert re.search(rf"^{name}(?:_bucket)?\{{[^}}]*\b{label}=", text, re.MULTILINE), (name, label)


def test_every_panel_has_a_title_a_unit_and_a_place_of_its_own() -> None:
    panels = json.loads(DASHBOARD.read_text())["panels"]
    places = [tuple(panel["gridPos"].values()) for panel in panels]
    assert len(set(places)) == len(panels) > 15
    assert all(panel["title"] and panel["fieldConfig"]["defaults"]["unit"] for panel in panels)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool (Debian's prometheus) is not installed")
def test_prometheus_takes_the_alert_rules() -> None:
    done = subprocess.run(["promtool", "check", "rules", str(ALERTS)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_role_that_alerts_name_is_one() -> None:
    roles = set(re.findall(r'role="(\w+)"', ALERTS.read_text()))
    assert roles <= {role.name.lower() for role in Role}
