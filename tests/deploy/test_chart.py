"""The Helm chart, rendered by Helm itself and held against the schemas of Kubernetes and against our own commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.deploy.arguments import check

helm = pytest.importorskip("helm_python", reason="helm-python-sdk renders charts; the test extra installs it")
kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="the test extra installs it")
yaml = pytest.importorskip("yaml", reason="the test extra installs it")

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "prfaas"
HOME: dict[str, Any] = {
    "model": {"path": "gemma"},
    "redis": {"passwordSecret": "redis"},
    "monitoring": {"serviceMonitor": True, "rules": True, "dashboard": True},
}
NODE = {"name": "prefill", "role": "prefill", "cluster": "east", "replicas": 2, "poolMiB": 512, "dial": "in"}
REMOTE: dict[str, Any] = {
    "model": {"path": "gemma", "name": "g"},
    "gateway": {"enabled": False},
    "redis": {"enabled": False},
    "join": {"url": "https://gw.example.org:8443", "tokenSecret": "join-east"},
    "nodes": [NODE | {"kvPort": 7443, "resources": {}}],
}
KINDS_OF_OTHERS = frozenset({"ServiceMonitor", "PrometheusRule"})
"""Whose schemas are not Kubernetes's own."""


def documents(values: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with helm.Chart.load(str(CHART)) as chart:
        rendered = chart.render(values, name="demo", namespace="prod")
    for name, text in rendered.items():
        if name.endswith(".yaml"):
            yield from (document for document in yaml.safe_load_all(text) if document)


def named(values: dict[str, Any], kind: str, name: str) -> dict[str, Any]:
    return next(d for d in documents(values) if (d["kind"], d["metadata"]["name"]) == (kind, name))


@pytest.mark.parametrize("values", [HOME, REMOTE], ids=["home", "remote"])
def test_helm_lints_the_chart(values: dict[str, Any]) -> None:
    report = helm.lint(str(CHART), values)
    assert report["errors"] == []
    assert [message for message in report["messages"] if message["severity"] > 1] == []


@pytest.mark.parametrize("version", ["1.27", "1.30", "1.34"])
@pytest.mark.parametrize("values", [HOME, REMOTE], ids=["home", "remote"])
def test_everything_is_what_kubernetes_takes(values: dict[str, Any], version: str) -> None:
    kinds = set()
    for document in documents(values):
        kinds.add(document["kind"])
        if document["kind"] not in KINDS_OF_OTHERS:
            kubernetes_validate.validate(document, version, strict=True)
    assert {"StatefulSet", "Service", "NetworkPolicy", "ServiceAccount", "PodDisruptionBudget"} <= kinds


@pytest.mark.parametrize("values", [HOME, REMOTE], ids=["home", "remote"])
def test_every_container_starts_a_command_with_flags_that_it_has(values: dict[str, Any]) -> None:
    started = []
    for document in documents(values):
        for container in document.get("spec", {}).get("template", {}).get("spec", {}).get("containers", ()):
            if container["image"].startswith("prfaas:"):
                started.append(container["name"])
                check(container["args"])
    assert sorted(started) == (["gateway", "node", "node"] if values is HOME else ["node"])


@pytest.mark.parametrize("values", [HOME, REMOTE], ids=["home", "remote"])
def test_no_pod_runs_as_root_writes_its_image_or_talks_to_kubernetes(values: dict[str, Any]) -> None:
    pods = [d["spec"]["template"]["spec"] for d in documents(values) if d["kind"] in ("StatefulSet", "Deployment")]
    assert pods
    for pod in pods:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["automountServiceAccountToken"] is False
        for container in pod["containers"]:
            assert container["securityContext"]["readOnlyRootFilesystem"] is True
            assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


def test_a_gateway_may_list_pods_only_where_its_engines_are_found_in_them() -> None:
    listed = HOME | {"gateway": {"engines": '[[engine]]\nurl = "http://e:8000"\nmodel = "m"\n'}}
    found = HOME | {"gateway": {"engines": '[[kubernetes]]\nselector = "app=vllm"\nmodel = "m"\n'}}
    for values, may in ((HOME, False), (listed, False), (found, True)):
        pod = named(values, "StatefulSet", "demo-gateway")["spec"]["template"]["spec"]
        assert pod["automountServiceAccountToken"] is may
        kinds = [document["kind"] for document in documents(values)]
        assert ("Role" in kinds, "RoleBinding" in kinds) == (may, may)
        assert ("--engines=/engines/engines.toml" in pod["containers"][0]["args"]) is (values is not HOME)
    rules = named(found, "Role", "demo-gateway")["rules"]
    assert rules == [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}]
    assert "[[kubernetes]]" in named(found, "ConfigMap", "demo-engines")["data"]["engines.toml"]


def test_names_are_what_they_are_to_yaml_too() -> None:
    name = 'g: "4b" # {{ x }}\n            - --fallback=fail'
    numbers = {"cluster": "2024", "name": "1e3", "kvPort": 7443, "resources": {}}
    values = HOME | {"model": {"path": "a: b", "name": name, "claim": "0x1"}, "nodes": [NODE | numbers]}
    for document in documents(values):
        if document["kind"] not in KINDS_OF_OTHERS:
            kubernetes_validate.validate(document, "1.34", strict=True)
    for kind in ("demo-gateway", "demo-1e3"):
        args = named(values, "StatefulSet", kind)["spec"]["template"]["spec"]["containers"][0]["args"]
        assert {"--model=/models/a: b", f"--model-name={name}"} <= set(args)


def test_selectors_find_the_pods_that_they_are_for() -> None:
    found = list(documents(HOME))
    pods = {
        d["metadata"]["name"]: d["spec"]["template"]["metadata"]["labels"]
        for d in found
        if d["kind"] in ("StatefulSet", "Deployment")
    }
    for document in found:
        spec = document.get("spec", {})
        selector = spec.get("selector", {})
        wanted = selector.get("matchLabels", selector) or spec.get("podSelector", {}).get("matchLabels")
        if document["kind"] in ("Service", "NetworkPolicy", "PodDisruptionBudget"):
            assert [name for name, labels in pods.items() if wanted.items() <= labels.items()], document["metadata"]


def test_nodes_find_gateways_before_these_are_ready() -> None:
    """A gateway is ready once nodes have joined, so nodes cannot wait for that."""
    args = named(HOME, "StatefulSet", "demo-decode")["spec"]["template"]["spec"]["containers"][0]["args"]
    url = next(a for a in args if a.startswith("--gateway="))
    assert url == "--gateway=https://demo-gateways.prod.svc:8443"
    assert named(HOME, "Service", "demo-gateways")["spec"]["publishNotReadyAddresses"] is True


@pytest.mark.parametrize(
    ("change", "named_value"),
    [
        ({"model": {"path": ""}}, "model/path"),
        ({"redis": {"enabled": False, "passwordSecret": ""}}, "gateway.replicas"),
        ({"redis": {"passwordSecret": ""}}, "redis.passwordSecret"),
        ({"gateway": {"enabled": False}, "nodes": [NODE]}, "join.url"),
        ({"gateway": {"enabled": False}, "nodes": [NODE | {"role": "decode"}]}, "decodes"),
        ({"nodes": [NODE | {"role": "both"}]}, "role"),
        ({"join": {"url": "http://gw"}}, "join/url"),
        ({"nodes": [NODE | {"name": "redis"}]}, "named redis already"),
        ({"nodes": [NODE, NODE]}, "named prefill already"),
        ({"nodes": [NODE | {"cluster": "east-"}]}, "cluster"),
    ],
)
def test_values_that_cannot_work_are_refused_by_name(change: dict[str, Any], named_value: str) -> None:
    with pytest.raises(helm.HelmError, match=named_value):
        list(documents(HOME | change))
