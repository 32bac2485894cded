"""An SGLang server behind a node: ``POST /pd_role_switch``, offered by servers started with --enable-pd-role-switch.

It refuses while anything runs there, and says so; that is worth trying again. A server that failed half way says that
it is unhealthy and must be restarted; that is not.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from gateway.executors import ConversionFailed, Order

TRY_AGAIN_S = 0.5


class SglangSwitch:
    """Switches one server. ``http`` has its URL and key; the caller of ``change`` bounds the time."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def change(self, order: Order) -> None:
        """Switch, and check what the server says of itself afterwards. Raises ConversionFailed."""
        role = order.role.name.lower()
        while not await self._switched(role):  # noqa: ASYNC110 (the server's state has no event here)
            await asyncio.sleep(TRY_AGAIN_S)
        plays = _live_role(await self._call("GET", "/server_info"))
        if plays is not None and plays != role:
            raise ConversionFailed("sglang", f"the server says that it plays {plays[:20]!r} after switching to {role}")

    async def _switched(self, role: str) -> bool:
        """False where it was busy."""
        said = await self._call("POST", "/pd_role_switch", {"new_role": role})
        message = str(said.get("message", ""))[:200]
        if said.get("success") is True:
            return True
        if "not idle" in message or "in progress" in message:
            return False
        raise ConversionFailed("sglang", message or "the server refused without a reason")

    async def _call(self, method: str, path: str, body: dict[str, str] | None = None) -> dict[str, Any]:
        try:
            answer = await self._http.request(method, path, json=body)
            plain = answer.json()
        except (httpx.HTTPError, ValueError) as error:
            raise ConversionFailed("sglang", f"{method} {path}: {error or type(error).__name__}") from error
        # a refused switch is a 400 with a body that says why
        if not isinstance(plain, dict) or (answer.is_error and "success" not in plain):
            raise ConversionFailed("sglang", f"{method} {path}: HTTP {answer.status_code}")
        return plain


def _live_role(info: dict[str, Any]) -> str | None:
    """What the scheduler plays now; the top level keeps the role that the server was launched with."""
    states = info.get("internal_states")
    first = states[0] if isinstance(states, list) and states else None
    mode = first.get("disaggregation_mode") if isinstance(first, dict) else None
    return mode if isinstance(mode, str) else None
