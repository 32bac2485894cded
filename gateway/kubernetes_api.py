"""The API server of the Kubernetes cluster that the gateway runs in, spoken to with the pod's service account."""

from __future__ import annotations

import ssl
from pathlib import Path

import httpx

from gateway.config import ConfigError

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
API_URL = "https://kubernetes.default.svc"


def api_client(url: str, ca: Path) -> httpx.AsyncClient:
    """A client for an API server whose certificate is signed by ``ca``. Raises OSError or ssl.SSLError."""
    return httpx.AsyncClient(
        base_url=url, verify=ssl.create_default_context(cafile=str(ca)), timeout=10.0, trust_env=False
    )


def in_cluster_client() -> httpx.AsyncClient:
    """A client for the cluster that this process runs in. Raises ConfigError where it runs in none."""
    try:
        return api_client(API_URL, SERVICE_ACCOUNT / "ca.crt")
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"--engines: [[kubernetes]] needs a pod with a service account: {SERVICE_ACCOUNT}/ca.crt: {error}"
        ) from error
