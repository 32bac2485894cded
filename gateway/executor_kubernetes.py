"""A pod's label, so that Services, disruption budgets and autoscalers that select by role follow the conversion.

One merge patch of ``metadata.labels`` through the API server, with the gateway's service account, which needs the verb
``patch`` on pods of its namespace and nothing else.
"""

from __future__ import annotations

from pathlib import Path

import httpx

from gateway.executors import ConversionFailed, Order


class PodLabel:
    """Labels one pod with the role. ``http`` speaks to the API server."""

    def __init__(self, http: httpx.AsyncClient, namespace: str, pod: str, label: str, token_file: Path) -> None:
        self._http = http
        self._path = f"/api/v1/namespaces/{namespace}/pods/{pod}"
        self._pod = pod
        self._label = label
        self._token_file = token_file

    async def change(self, order: Order) -> None:
        """Patch the label and check what the API server answers. Raises ConversionFailed."""
        role = order.role.name.lower()
        patch = {"metadata": {"labels": {self._label: role}}}
        try:
            # read anew each time: the kubelet rotates it
            token = self._token_file.read_text(encoding="ascii").strip()
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/merge-patch+json"}
            answer = await self._http.patch(self._path, json=patch, headers=headers)
            answer.raise_for_status()
            labels = answer.json()["metadata"]["labels"]
        except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError) as error:
            raise ConversionFailed(
                "kubernetes", f"label of pod {self._pod}: {error or type(error).__name__}"
            ) from error
        if labels.get(self._label) != role:
            raise ConversionFailed("kubernetes", f"pod {self._pod} kept {self._label}={labels.get(self._label)!r}")
